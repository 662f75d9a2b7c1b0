// Marks what libzero.so exports. All other symbols are hidden, so that programs cannot depend on them.
#pragma once

#define ZERO_API [[gnu::visibility("default")]]
