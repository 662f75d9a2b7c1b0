// The commands of the tools. argv[0] is the command's name. Each returns the exit code of the process and may throw the
// four errors (guarded() converts them to exit codes).
#pragma once

// In `zero`, without torch.
int zero_run(int argc, char** argv);
int zero_config(int argc, char** argv);
int zero_doctor(int argc, char** argv);
int zero_plan(int argc, char** argv);  // with --measure in `zero-torch`
int zero_report(int argc, char** argv);
int zero_models(int argc, char** argv);
int zero_explain(int argc, char** argv);  // with --live in `zero-torch`

// In `zero-torch`.
int zero_checkpoint(int argc, char** argv);
int zero_torch_check(int argc, char** argv);
