// `zero reproduce NAME...`: runs experiments and writes what they found.
#pragma once

// argv[0] is the command's name. Returns the exit code of the process, and may throw the four errors.
int zero_reproduce(int argc, char** argv);
