// Taking a model over: what it is made of, agreement between ranks, where states rest, first values.
#pragma once
#include <memory>

#include "engine/parts.h"

namespace zero::engine {

// Fills `parts`, up to where the model is still as it was. Collective: every rank throws, or none.
void build(Parts& parts);
// The model's values move in, and its parameters point there from now on. Collective.
void adopt_model(Parts& parts);
// Its parameters are usable, where they are whole on this rank; else they say why they are not.
void abandon_model(Parts& parts) noexcept;

}  // namespace zero::engine
