// ZeRO-Offload at world 1: a training step of a GPT whose optimizer is in host memory or a file, compared with the
// longest of what it must do: forward and backward on the device, copies of gradients and parameters, and the update on
// the CPU. A step without a delayed update computes first and updates then, so only the copies can overlap; a delayed
// update also overlaps with the next step's computation (ZeRO-Offload, arXiv:2101.06840, sections 4 and 5).
//
//   offload_bench [--tier cpu|nvme] [--path DIR] [--delayed 0|1] [--stage 2] [--pinned 0|1], options of overhead_bench
#include "measure.h"

int main(int argc, char** argv) {
  const measure::Flags flag("offload_bench",
                            {{"--steps", "8"},
                             {"--stage", "2"},
                             {"--delayed", "0"},
                             {"--pinned", "0"},
                             {"--tier", "cpu"},
                             {"--path", "/tmp"}},
                            argc, argv);
  flag.among("--tier", {"cpu", "nvme"});
  const auto steps = flag.number("--steps"), per_turn = flag.number("--turn");
  const bool delayed = flag.number("--delayed") != 0;
  const auto comm = zero::Communicator::local();
  const auto device = flag.device(*comm);
  at::set_num_threads(static_cast<int>(flag.number("--threads")));
  const auto shape = flag.shape();
  const auto dtype = flag.bf16() ? at::kBFloat16 : at::kFloat;
  const auto ids = flag.tokens(shape, device);
  double compute_ms = 0;
  {
    models::Gpt twin(shape);
    twin->to(device, dtype);
    const auto compute = [&] {
      auto loss = measure::loss_of(twin, ids);
      loss.backward();
      for (auto& p : twin->parameters()) p.mutable_grad() = at::Tensor();
      return loss.detach();
    };
    measure::timed_turn(device, 2, compute);
    compute_ms = measure::timed_turn(device, 3, compute).elapsed;
  }
  // What travels: every gradient and every new parameter once.
  double copy_ms = 0;
  if (flag.on_gpu()) {
    const auto numel = std::min<std::int64_t>(shape.num_parameters(), std::int64_t{1} << 28);
    const auto there = at::zeros({numel}, at::TensorOptions().device(device).dtype(dtype));
    const auto host = at::empty({numel}, at::TensorOptions().dtype(dtype).pinned_memory(true));
    const auto round_trip = [&] {
      host.copy_(there, /*non_blocking=*/true);
      there.copy_(host, /*non_blocking=*/true);
      return there.narrow(0, 0, 1);
    };
    measure::timed_turn(device, 1, round_trip);
    copy_ms = measure::timed_turn(device, 3, round_trip).elapsed * static_cast<double>(shape.num_parameters()) /
              static_cast<double>(numel);
  }
  models::Gpt net(shape);
  net->to(device);
  zero::Engine engine(net,
                      flag.options(R"("stage": )" + flag.text("--stage") + R"(, "offload_optimizer": {"device": ")" +
                                       flag.text("--tier") + R"(", "nvme_path": ")" + flag.text("--path") +
                                       R"(", "pin_memory": )" + (flag.number("--pinned") != 0 ? "true" : "false") +
                                       R"(}, "delayed_update": {"enabled": )" + (delayed ? "true}" : "false}"),
                                   R"(, "wall_clock_breakdown": true)"),
                      comm);
  const auto step = [&] {
    auto loss = measure::loss_of(net, ids);
    engine.backward(loss);
    engine.step();
    return loss.detach();
  };
  measure::timed_turn(device, 3, step);  // learns the order, allocates, fills both of a delayed update's buffers
  const double before = engine.times().optimizer_s;
  std::vector<double> times;
  for (long long k = 0; k < steps; ++k) times.push_back(measure::timed_turn(device, per_turn, step).elapsed);
  const double step_ms = measure::median(times);
  const double update_ms = (engine.times().optimizer_s - before) * 1e3 / static_cast<double>(steps * per_turn);
  const double longest = std::max({compute_ms, copy_ms, update_ms});
  const auto report = engine.memory();
  const char* const format =
      flag.json ? "{\"schema\": \"zero.bench.offload/1\", \"device\": \"%s\", \"recipe\": \"%s\", \"stage\": %lld, "
                  "\"delayed\": %s, \"parameters_elements\": %lld, \"batch\": %lld, \"threads\": %lld, "
                  "\"step_ms\": %.3f, \"compute_ms\": %.3f, \"copy_ms\": %.3f, \"update_ms\": %.3f, "
                  "\"step_over_longest\": %.4f, \"step_over_compute_and_update\": %.4f, \"steps_ms\": %s, "
                  "\"device_peak_bytes\": %llu}\n"
                : "%s, %s, stage %lld, delayed %s, %lld parameters, batch %lld, %lld threads\n"
                  "step %.1f ms, compute %.1f ms, copies %.1f ms, update %.1f ms\n"
                  "step over the longest %.3f, over compute and update %.3f; steps %s; %llu bytes at most\n";
  std::printf(format, flag.text("--device").c_str(), flag.text("--recipe").c_str(), flag.number("--stage"),
              delayed ? "true" : "false", static_cast<long long>(shape.num_parameters()), flag.number("--batch"),
              flag.number("--threads"), step_ms, compute_ms, copy_ms, update_ms, step_ms / longest,
              step_ms / (compute_ms + update_ms), measure::list_of(times).c_str(),
              static_cast<unsigned long long>(report.allocator ? report.allocator->allocated_peak : 0));
  return 0;
}
