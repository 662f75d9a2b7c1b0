// Programs may be started without stdin, stdout or stderr (daemons, cron, `2>&-`). Then the next file that is opened
// gets descriptor 0, 1 or 2, and whatever is printed goes into that file. These functions prevent it.
#pragma once

namespace zero::base {

// `fd`, moved to 3 or above if it is below (close-on-exec); -1 with errno if `fd` is negative or cannot be moved. For
// every descriptor that is written through.
int off_standard(int fd);

// Opens /dev/null on those of the descriptors 0 to 2 that are closed. For programs, first of all, and before a stream
// of the standard library opens a file.
void fill_standard_streams();

}  // namespace zero::base
