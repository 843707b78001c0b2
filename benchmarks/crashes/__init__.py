"""The crash injector: ends gpushare, or lets a system call fail, at each of its side effects in turn."""
