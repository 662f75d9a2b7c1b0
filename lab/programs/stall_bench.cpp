// What a save in the background costs the step after it, in one rank that computes with one thread: the call, the
// forward and backward while the writer runs, and the update with the commit. Steps with and without a save take turns.
//
// Then, without the library, the forward and backward of the same model next to a stand-in for a writer: the same
// bytes written directly by four threads, alone and with one more thread that is busy. What the busy one adds is the
// kernel's work for the writes, which then runs on the CPU that computes.
//
//   stall_bench [--rounds 10] [--steps 2] [--path DIR] and the options of overhead_bench for the model
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <thread>

#include "measure.h"

namespace {

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Switches of this thread to another although it could continue.
double switches() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return static_cast<double>(usage.ru_nivcsw);
}

constexpr std::size_t kPiece = 4 << 20;

void write_directly(const std::string& path, std::size_t bytes) {
  const std::unique_ptr<char, decltype(&std::free)> data(static_cast<char*>(std::aligned_alloc(4096, kPiece)),
                                                         &std::free);
  std::memset(data.get(), 1, kPiece);
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0666);
  if (fd < 0 || ::posix_fallocate(fd, 0, static_cast<off_t>(bytes)) != 0) return std::perror(path.c_str());
  std::vector<std::thread> threads;
  for (std::size_t k = 0; k < 4; ++k)
    threads.emplace_back([&, k] {
      for (auto at = k * kPiece; at + kPiece <= bytes; at += 4 * kPiece)
        if (::pwrite(fd, data.get(), kPiece, static_cast<off_t>(at)) != static_cast<ssize_t>(kPiece))
          std::perror("pwrite");
    });
  for (auto& thread : threads) thread.join();
  ::fdatasync(fd);
  ::close(fd);
}

// Medians over the rounds, in ms.
struct Column {
  std::vector<double> values;
  void add(double value) { values.push_back(value); }
  double median() const { return measure::median(values); }
};

}  // namespace

int main(int argc, char** argv) {
  const measure::Flags flag("stall_bench", {{"--rounds", "10"}, {"--steps", "2"}, {"--path", "/tmp"}}, argc, argv);
  const auto folder = std::filesystem::path(flag.text("--path")) / ("stall-bench-" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  at::set_num_threads(1);
  const auto shape = flag.shape();
  const auto ids = flag.tokens(shape, c10::kCPU);
  const auto comm = zero::Communicator::local();
  models::Gpt net(shape);
  auto engine = std::make_unique<zero::Engine>(
      net, flag.options(R"("stage": 1)", R"(, "checkpoint": {"writer": {"decoupled": true}})"), comm);
  struct Step {
    double forward = 0, update = 0, switches = 0;
  };
  const auto step = [&] {
    Step s;
    const double switched = switches(), begin = now_s();
    auto loss = measure::loss_of(net, ids);
    engine->backward(loss);
    s.forward = now_s() - begin;
    s.switches = switches() - switched;
    engine->step();
    s.update = now_s() - begin - s.forward;
    return s;
  };
  const auto rounds = flag.number("--rounds"), rest = flag.number("--steps") - 1;
  for (int k = 0; k < 4; ++k) step();
  Column call, forward, update, stall, switched, save;
  for (long long r = 0; r < rounds; ++r) {
    Step with, without;
    double call_s = 0, all_with = 0, all_without = 0;
    const auto run = [&](Step& first, double& all) {
      const double begin = now_s();
      first = step();
      for (long long k = 0; k < rest; ++k) step();
      all = now_s() - begin;
    };
    const auto saving = [&] {
      const double begin = now_s();
      engine->save_checkpoint(folder, "t");
      call_s = now_s() - begin;
      run(with, all_with);
      engine->finish_checkpoint();
    };
    r % 2 == 0 ? saving() : run(without, all_without);
    r % 2 == 0 ? run(without, all_without) : saving();
    const double begin = now_s();
    engine->save_checkpoint(folder, "t");
    engine->finish_checkpoint();
    save.add((now_s() - begin) * 1e3);
    step();
    call.add(call_s * 1e3);
    forward.add((with.forward - without.forward) * 1e3);
    update.add((with.update - without.update) * 1e3);
    stall.add((call_s + all_with - all_without) * 1e3);
    switched.add(with.switches - without.switches);
  }
  const auto bytes = static_cast<std::size_t>(shape.num_parameters()) * 12;
  engine.reset();
  const auto compute = [&] {
    const double begin = now_s();
    auto loss = measure::loss_of(net, ids);
    loss.backward();
    for (auto& p : net->parameters()) p.mutable_grad() = at::Tensor();
    return now_s() - begin;
  };
  compute();
  const auto with_writer = [&](bool busy, Column& slower, Column& switched) {
    for (long long r = 0; r < rounds; ++r) {
      const double alone = compute();
      std::atomic<bool> end{false};
      std::thread other([&] {
        volatile double x = 1;
        while (busy && !end) x = x * 1.0000001;
      });
      std::thread writer([&] {
        write_directly((folder / "direct").string(), bytes);
        end = true;
      });
      const double before = switches();
      slower.add((compute() - alone) * 1e3);
      switched.add(switches() - before);
      writer.join();
      other.join();
    }
  };
  Column writes, writes_switched, both, both_switched;
  with_writer(false, writes, writes_switched);
  with_writer(true, both, both_switched);
  std::filesystem::remove_all(folder);
  const char* const format =
      flag.json
          ? "{\"schema\": \"zero.bench.stall/1\", \"bytes\": %zu, \"rounds\": %lld, \"save_ms\": %.2f, \"call_ms\": "
            "%.2f, \"forward_ms\": %.2f, \"update_ms\": %.2f, \"stall_ms\": %.2f, \"stalls_ms\": %s, \"switches\": "
            "%.0f, \"writes_alone\": {\"forward_ms\": %.2f, \"switches\": %.0f}, \"writes_and_busy_thread\": "
            "{\"forward_ms\": %.2f, \"switches\": %.0f}}\n"
          : "%zu bytes, medians of %lld rounds, ms\n"
            "save, waited for            %8.2f\n"
            "in the background: call     %8.2f\n"
            "  forward and backward    + %8.2f\n"
            "  update and commit       + %8.2f\n"
            "  all steps               + %8.2f   %s\n"
            "  switches                + %8.0f\n"
            "direct writes alone:      + %8.2f, switches %.0f\n"
            "and a busy thread:        + %8.2f, switches %.0f\n";
  std::printf(format, bytes, rounds, save.median(), call.median(), forward.median(), update.median(), stall.median(),
              measure::list_of(stall.values).c_str(), switched.median(), writes.median(), writes_switched.median(),
              both.median(), both_switched.median());
  return 0;
}
