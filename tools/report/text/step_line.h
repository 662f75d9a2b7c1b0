// One training step as the plain line of `zero train` and as one JSON object of `--json`.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/report/text/axis_bytes.h"

namespace zero::report {

// Bytes at the end of a part of the step, and the highest within it.
struct MemoryPoint {
  std::string after;  // "forward"
  std::uint64_t device_bytes = 0, device_peak = 0, host_bytes = 0, host_peak = 0;
};

// Unknown values are omitted from the line and the object.
struct StepRow {
  std::int64_t step = 0, steps = 0;  // steps 0: unknown
  double loss = 0;
  std::optional<double> grad_norm, lr, loss_scale;
  std::optional<std::int64_t> skipped;  // steps skipped so far
  std::optional<std::uint64_t> memory_bytes, memory_limit_bytes;
  std::optional<double> step_seconds, tokens_per_s;
  std::optional<double> comm_part, io_part;  // of the step's time, 0 to 1
  std::optional<double> eta_seconds;
  std::optional<std::int64_t> ranks;        // of the run; restarts may change it
  std::optional<std::uint64_t> bytes_sent;  // in this step, by this rank
  std::optional<AxisBytes> sent_by_axis;    // the same by kind of parallelism, if ranks exchange activations
  // Of experts: the sum of the auxiliary losses, the dropped share of choices, the busiest expert's tokens over the
  // mean, of the layer where that is highest.
  std::optional<double> aux_loss, dropped, load_max;
  // Parts of the step; reduce: the part of backward spent waiting for reductions.
  std::optional<double> forward_seconds, backward_seconds, reduce_seconds, update_seconds;
  std::vector<MemoryPoint> memory;
};

// step 14/300 loss 3.24405 grad_norm 0.8319 lr 3.0e-05 scale 65536 skipped 0 mem 9.46GiB (65%) 7282 tok/s ...
//   with the parts at its end, and the memory points, if there are any, as a second line.
std::string step_line(const StepRow& row);
// {"step": 14, "loss": ..., "grad_norm": ..., "lr": ..., "loss_scale": ..., "step_ms": ..., ...}, one line
// without its newline. Numbers that are not finite are null.
std::string step_json(const StepRow& row);

// An evaluation of the held-out part after a step.
struct HeldoutRow {
  std::int64_t step = 0, steps = 0;  // steps 0: unknown
  double loss = 0;
  std::vector<std::pair<std::string, double>> metrics;  // the task's: "f1"
};
// step 14/300 held-out 1.44005 perplexity 4.221
std::string heldout_line(const HeldoutRow& row);
// {"step": 14, "heldout_loss": ..., "metrics": {"perplexity": ...}}, as step_json.
std::string heldout_json(const HeldoutRow& row);

}  // namespace zero::report
