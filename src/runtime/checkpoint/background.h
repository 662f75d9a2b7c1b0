// A save whose files are written while the program trains.
#pragma once
#include <memory>

#include "checkpoint/save.h"

namespace zero::checkpoint {

// Takes over a save that has begun. [collective]
void write_in_background(engine::State& state, std::unique_ptr<Save> save);

}  // namespace zero::checkpoint
