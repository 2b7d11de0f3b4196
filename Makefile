# Every target sets up what it needs: a virtual environment of its own, with the versions pinned in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS := 1
# hundreds of fresh processes import the package in the tests: none shall compile it again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test test-torch check demo demo-seed bench bench-record bench-monitor bench-compare bench-precheck detect campaign innocent clean

# three files of tests at a time on two cores: most wait for the processes that they start; types are checked beside them
test: .stamp-venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .mypy_cache; $(BIN)/mypy > .mypy_cache/told 2>&1 & types=$$!; \
	echo '$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder'; \
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types; typed=$$?; echo '$(BIN)/mypy'; cat .mypy_cache/told; exit $$((tests ? tests : typed))

# the same on another release of torch, in an environment of its own: make test-torch VERSION=2.14.1
# (PyPI's builds for Linux bring some five gigabytes of CUDA libraries)
test-torch:
	@test -n "$(VERSION)" || { echo 'name a release of torch: make test-torch VERSION=2.14.1'; exit 2; }
	$(PYTHON) -m venv .venv-torch-$(VERSION)
	sed '/^torch==/d; /^setuptools==/d' constraints.txt > .venv-torch-$(VERSION)/constraints.txt
	.venv-torch-$(VERSION)/bin/python -m pip install --quiet torch==$(VERSION)
	.venv-torch-$(VERSION)/bin/python -m pip install --quiet --constraint .venv-torch-$(VERSION)/constraints.txt \
		torch==$(VERSION) --requirement requirements-dev.txt
	.venv-torch-$(VERSION)/bin/python -m pip install --quiet --constraint .venv-torch-$(VERSION)/constraints.txt \
		torch==$(VERSION) --no-build-isolation --editable .
	.venv-torch-$(VERSION)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

check: .stamp-venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: .stamp-venv
	$(BIN)/bitwitness demo

demo-seed: .stamp-venv
	$(BIN)/bitwitness demo --seed

bench: .stamp-venv
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/price.py
	$(BIN)/python bench/nonfinite.py
	$(BIN)/python bench/together.py

# set BITWITNESS_PEER_PYTHON to a Python with mindstudio-probe to have it measured beside
bench-record: .stamp-venv
	$(BIN)/python bench/record.py
	$(BIN)/python bench/side_by_side.py

# the same Python with trainscope, too
bench-monitor: .stamp-venv
	$(BIN)/python bench/monitor.py
	$(BIN)/python bench/monitor_clean.py

bench-compare: .stamp-venv
	$(BIN)/python bench/compare.py

# every operator on trial: wrong variants, and what it costs beside msprobe
bench-precheck: .stamp-venv
	$(BIN)/python bench/mutation.py
	$(BIN)/python bench/precheck.py

detect: .stamp-venv
	$(BIN)/python bench/detect.py

campaign: .stamp-venv
	$(BIN)/python bench/campaign.py
	$(BIN)/python -W ignore bench/corrupt.py
	$(BIN)/python bench/recovery_kills.py
	$(BIN)/python bench/clean.py
	$(BIN)/python bench/lost.py
	$(BIN)/python -W ignore bench/trace_campaign.py
	$(BIN)/python bench/inputs.py
	$(BIN)/python bench/kills.py
	TEST_EVERYTHING=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
	$(BIN)/python bench/innocent.py --faults --only late_one_feature --repeat 44 --jobs 2 --out bench/results/late

innocent: .stamp-venv
	$(BIN)/python bench/innocent.py --faults --jobs 2
	$(BIN)/python bench/innocent.py --as-users --times 25 --steps-total 100000 --jobs 2
	$(BIN)/python bench/innocent_ranks.py

.stamp-venv: pyproject.toml constraints.txt hatch_build.py $(wildcard src/bitwitness/stats/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "bitwitness needs Python 3.11 or newer; set PYTHON=… (seen: " + sys.version.split()[0] + ")")'
	$(PYTHON) -m venv .venv
	# torch pinned, in one resolution with the rest: any other may pull a build with gigabytes of CUDA libraries
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt \
		torch==2.13.0 --requirement requirements-dev.txt
	# beside each other: bytecode on all cores, without what is hardly ever imported (what does not compile is nobody's concern
	# here), and the package, whose reader a C compiler takes twenty seconds of one core for
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/|/transformers/models/|/torch/(testing|ao|onnx)/|/site-packages/(pip|mypyc?|setuptools|networkx|polars|torchgen|aiohttp)/' .venv/lib >/dev/null 2>&1 & bytecode=$$!; \
	echo '$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable .'; \
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable .; installed=$$?; \
	wait $$bytecode; exit $$installed
	@touch $@

clean:
	rm -rf .venv .stamp-venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
