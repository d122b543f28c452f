// cgo compiles the C files of one folder only; setup.py passes a hash of csrc/, so that edits there are noticed.
#include "../../csrc/digest.c"
#include "../../csrc/errors.c"
#include "../../csrc/event.c"
#include "../../csrc/fork.c"
#include "../../csrc/memory.c"
#include "../../csrc/module.c"
#include "../../csrc/vote.c"
#include "../../csrc/wait.c"
