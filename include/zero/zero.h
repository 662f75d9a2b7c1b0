// libzero: sharded data-parallel training for libtorch. The one include of a training program.
#pragma once
#include <torch/torch.h>

#include <zero/library.h>
