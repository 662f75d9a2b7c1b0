// Construction of an Engine from a model: its parts, agreement between ranks, placement of states, initial values.
#pragma once
#include <memory>

#include "engine/parts.h"

namespace zero::engine {

// Fills `parts` without changing the model. Collective: throws on every rank or on none.
void build(Parts& parts);
// Copies the model's values into the Engine's buffers and points the parameters there. Collective.
void adopt_model(Parts& parts);
// Releases the model: unsharded parameters stay usable, sharded ones throw an explanation when read.
void abandon_model(Parts& parts) noexcept;

}  // namespace zero::engine
