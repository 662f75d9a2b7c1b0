// What all parts of a step share.
#pragma once
#include "step/memory.h"
#include "step/observer.h"

namespace zero::step {

struct Context {
  const RunFacts& facts;
  Backend backend;
  Memory& memory;
  Observer& observer;

  // Host memory that the device can copy from and to.
  Place host() const { return facts.topology.gpu ? Place::PinnedHost : Place::Host; }
  Place place_of(Tier tier) const {
    return tier == Tier::File ? Place::File : tier == Tier::Host ? host() : Place::Device;
  }
};

}  // namespace zero::step
