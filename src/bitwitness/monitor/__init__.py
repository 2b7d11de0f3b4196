"""What a training's numbers do, step by step: their series, rules that watch them, where they go."""
