"""The I/O study: `statehold bench io`, and strategies that statehold does not have beside it.

__main__       `python -m bench.io_study PATH`, with the options of `statehold bench io`
alternatives   files for each tensor, shared files, buffered and single transfers
threads        moves their bytes
plot           the rates of every strategy, if matplotlib is installed
"""
