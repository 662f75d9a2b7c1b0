// All of libzero, without <torch/torch.h>: a source that names the torch headers it needs is compiled in half the time.
#pragma once

#include <zero/activation_checkpoint.h>
#include <zero/build.h>
#include <zero/communicator.h>
#include <zero/device.h>
#include <zero/engine.h>
#include <zero/errors.h>
#include <zero/flat_optimizer.h>
#include <zero/log.h>
#include <zero/memory_report.h>
#include <zero/mesh.h>
#include <zero/monitor.h>
#include <zero/options.h>
#include <zero/options_builder.h>
#include <zero/program_steps.h>
#include <zero/read_scope.h>
#include <zero/sp.h>
#include <zero/torch_check.h>
#include <zero/tp.h>
#include <zero/trace.h>
#include <zero/update_rule.h>
#include <zero/version.h>
#include <zero/work.h>
