// What libzero.so exports. The rest of it is hidden, so that no program can come to depend on it.
#pragma once

#define ZERO_API [[gnu::visibility("default")]]
