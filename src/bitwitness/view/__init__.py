"""``bitwitness view``: the model as a graph in the browser, one run or two beside each other, and a run that goes on."""
