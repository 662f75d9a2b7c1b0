# The versions of torch that libzero builds with. The tests of the gate were run with the oldest and the newest; with those
# between, the check of torch and the comparison of stages. Other patch versions of the same minor ones are tried when they
# are first used (include/zero/torch_check.h). The one home of the window; tests/version_test.py compares script/setup and
# the documents with it.
set(ZERO_TESTED_TORCH 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0)
list(TRANSFORM ZERO_TESTED_TORCH REPLACE "\\.[0-9]+$" "" OUTPUT_VARIABLE ZERO_TORCH_MINORS)
