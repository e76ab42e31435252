"""The machine code of every kernel in the built extension: `python -m profiling.sass`.

`dump` reads the library, `names` shortens kernels' names, `rules` says what must hold whatever the compiler, `manifest`
compares with the committed numbers of one compiler. No GPU is needed.
"""
