// `zero bench collectives`: the time of reduce-scatter, all-gather and all-reduce by size and transport, with ranks as
// processes and every result checked. Compared with a plain copy of the same bytes, and with the gloo library's own
// algorithms, which libzero's gloo transport does not use. Transports alternate in rounds, so that changes of the
// machine's speed affect all of them.
#include <ATen/Parallel.h>
#include <torch/types.h>
#include <torch/version.h>
#include <zero/library.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <optional>

#include "lab/bench/bench.h"
#include "lab/bench/bench_ranks.h"
#include "lab/bench/gloo_library.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/options.h"
#include "tools/support/rank_processes.h"

namespace zero::cli {
namespace collectives_bench {
namespace {

constexpr const char* kName = "bench collectives";
constexpr const char* kCopy = "memcpy";
constexpr const char* kLibrary = "gloo_library";
constexpr std::int64_t kBytesPerRow = 256 << 20;  // approximate bytes of a row in one round; determines its repetitions
constexpr std::int64_t kFewest = 3, kMost = 100;

struct Setup {
  std::int64_t world = 0, threads = 1, rounds = 3, least = 64 << 10, most = 256 << 20;
  std::string operations = "reduce_scatter,all_gather,all_reduce", transports = "shm,gloo,gloo_library", dtype = "fp32";
};

// One row of one transport: seconds of all its calls.
struct Row {
  std::string operation;
  std::int64_t bytes = 0;
  std::map<std::string, std::vector<double>> seconds;  // by transport; kCopy from all
  std::map<std::string, std::vector<double>> round_medians;
};

// The operations to measure. Each call waits for its result.
struct Calls {
  std::function<at::Tensor(std::int64_t, at::ScalarType)> allocate;
  std::function<void(const at::Tensor&, const at::Tensor&)> all_gather, reduce_scatter;  // out, in
  std::function<void(const at::Tensor&)> all_reduce;
};

Calls calls_of(Communicator& comm) {
  return {[&](std::int64_t numel, at::ScalarType dtype) { return comm.allocate(numel, dtype); },
          [&](const at::Tensor& out, const at::Tensor& in) { comm.all_gather(out, in)->wait(); },
          [&](const at::Tensor& out, const at::Tensor& in) { comm.reduce_scatter(out, in)->wait(); },
          [&](const at::Tensor& inout) { comm.all_reduce(inout)->wait(); }};
}

Calls calls_of(GlooLibrary& library) {
  return {[](std::int64_t numel, at::ScalarType dtype) { return at::empty({numel}, dtype); },
          [&](const at::Tensor& out, const at::Tensor& in) { library.all_gather(out, in); },
          [&](const at::Tensor& out, const at::Tensor& in) { library.reduce_scatter(out, in); },
          [&](const at::Tensor& inout) { library.all_reduce(inout); }};
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Small whole numbers, different for every rank and element: sums of 64 ranks are exact in bf16, too.
at::Tensor values_of(int rank, std::int64_t elements, at::ScalarType dtype) {
  constexpr std::int64_t kPeriod = 5 * 65536;
  const auto period = at::arange(std::min(elements, kPeriod), at::kLong).mul_(7).add_(3 * rank).remainder_(5).to(dtype);
  return period.repeat({(elements + period.numel() - 1) / period.numel()}).narrow(0, 0, elements);
}

at::Tensor sum_of(int world, std::int64_t elements, at::ScalarType dtype) {
  auto sum = values_of(0, elements, dtype);
  for (int rank = 1; rank < world; ++rank) sum.add_(values_of(rank, elements, dtype));
  return sum;
}

void check(const at::Tensor& got, const at::Tensor& expected, const std::string& operation, std::int64_t bytes) {
  if (!at::equal(got, expected))
    throw InternalError("[zero bench collectives] got a wrong result of " + operation + " over " +
                        std::to_string(bytes) + " bytes, expected the exact sum or the ranks' parts");
}

std::int64_t repetitions(std::int64_t bytes) { return std::clamp(kBytesPerRow / bytes, kFewest, kMost); }

// Calls `prepare`, untimed, then `call`, timed, with all ranks starting together. The first call is a warm-up.
// `checked` verifies the result of the first and the last call.
template <class Prepare, class Call, class Checked>
std::vector<double> time_calls(Communicator& comm, std::int64_t bytes, Prepare prepare, Call call, Checked checked) {
  std::vector<double> seconds;
  const auto count = repetitions(bytes);
  for (std::int64_t k = -1; k < count; ++k) {
    prepare();
    comm.barrier();
    const auto start = Clock::now();
    call();
    const double took = seconds_since(start);
    if (k < 0 || k + 1 == count) checked();
    if (k >= 0) seconds.push_back(took);
  }
  return seconds;
}

// `bytes`: total bytes gathered, scattered or summed; a rank's part is 1/world of it.
std::vector<double> measure(const std::string& operation, std::int64_t bytes, at::ScalarType dtype, Communicator& comm,
                            const Calls& calls) {
  const int rank = comm.rank(), world = comm.size();
  const auto width = static_cast<std::int64_t>(c10::elementSize(dtype));
  const std::int64_t part = std::max<std::int64_t>(1, bytes / width / world), elements = part * world;
  const auto nothing = [] {};
  if (operation == kCopy) {
    const auto from = values_of(rank, elements, dtype);
    const auto to = at::empty_like(from);
    return time_calls(
        comm, bytes, nothing, [&] { std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes()); },
        [&] { check(to, from, operation, bytes); });
  }
  const auto whole = calls.allocate(elements, dtype), mine = calls.allocate(part, dtype);
  if (operation == "all_gather") {
    at::Tensor expected = at::empty({elements}, dtype);
    for (int r = 0; r < world; ++r) expected.narrow(0, r * part, part).copy_(values_of(r, part, dtype));
    mine.copy_(values_of(rank, part, dtype));
    return time_calls(
        comm, bytes, nothing, [&] { calls.all_gather(whole, mine); },
        [&] { check(whole, expected, operation, bytes); });
  }
  const auto sum = sum_of(world, elements, dtype), own = values_of(rank, elements, dtype);
  if (operation == "reduce_scatter") {
    whole.copy_(own);
    const auto expected = sum.narrow(0, rank * part, part);
    return time_calls(
        comm, bytes, nothing, [&] { calls.reduce_scatter(mine, whole); },
        [&] { check(mine, expected, operation, bytes); });
  }
  return time_calls(
      comm, bytes, [&] { whole.copy_(own); }, [&] { calls.all_reduce(whole); },
      [&] { check(whole, sum, operation, bytes); });
}

// All rows of one transport in one round: {"transport", "rows": [{"operation", "bytes", "seconds": [...]}]}.
Json measure_rows(const Json& task, Communicator& comm) {
  at::set_num_threads(task.at("threads").get<int>());
  const auto dtype = task.at("dtype") == "bf16" ? at::kBFloat16 : at::kFloat;
  std::optional<GlooLibrary> library;
  if (task.at("library").get<bool>()) library.emplace(comm);
  const auto calls = library ? calls_of(*library) : calls_of(comm);
  Json rows = Json::array();
  for (const auto& row : task.at("rows")) {
    const auto operation = row.at(0).get<std::string>();
    const auto bytes = row.at(1).get<std::int64_t>();
    rows.push_back(
        {{"operation", operation}, {"bytes", bytes}, {"seconds", measure(operation, bytes, dtype, comm, calls)}});
  }
  return {{"transport", library ? std::string(kLibrary) : comm.transport()}, {"rows", rows}};
}

void declare(Command& c, Setup& s) {
  c.section("What is measured");
  c.option("--operations", s.operations, "LIST", "comma-separated (reduce_scatter,all_gather,all_reduce)");
  c.option("--transports", s.transports, "LIST",
           "shm, gloo (libzero over TCP), gloo_library (as in torch.distributed), comma-separated (all)");
  c.choice("--dtype", s.dtype, {"fp32", "bf16"}, "of the elements (fp32)");
  c.option("--smallest", s.least, "BYTES", "first size (65536); each next one is four times as large", 64,
           std::int64_t{1} << 36);
  c.option("--largest", s.most, "BYTES", "largest size (268435456)", 64, std::int64_t{1} << 36);
  c.option("--world", s.world, "N", "ranks, each a process (2); under a launcher its ranks are used", 2, 64);
  c.option("--threads", s.threads, "N", "threads per rank (1)", 1, 1024);
  c.option("--rounds", s.rounds, "N", "rounds of every transport, in new processes (3)", 1, 1000);
}

std::vector<Row> rows_of(const Setup& setup) {
  if (setup.most < setup.least)
    throw ConfigError("[--largest] got " + std::to_string(setup.most) + ", expected at least --smallest, " +
                      std::to_string(setup.least));
  auto operations = list_of("--operations", setup.operations, {"reduce_scatter", "all_gather", "all_reduce"});
  operations.insert(operations.begin(), kCopy);
  std::vector<Row> rows;
  for (const auto& operation : operations)
    for (auto bytes = setup.least; bytes <= setup.most; bytes *= 4) rows.push_back({operation, bytes, {}, {}});
  return rows;
}

double rate(const Row& row, const std::string& transport) {
  return static_cast<double>(row.bytes) / quantile(row.seconds.at(transport), 0.5);
}

Json document_of(const Setup& setup, const std::vector<Row>& rows, const std::vector<std::string>& transports) {
  Json about = machine();
  about["threads_per_rank"] = setup.threads;
  about["libtorch"] = TORCH_VERSION;
  Json document = {{"schema", "zero.bench.collectives/1"},
                   {"machine", about},
                   {"world", setup.world},
                   {"dtype", setup.dtype},
                   {"rounds", setup.rounds},
                   {"runs", Json::array()},
                   {"ratios", Json::array()}};
  for (const auto& row : rows) {
    for (const auto& [transport, seconds] : row.seconds)
      document["runs"].push_back({{"operation", row.operation},
                                  {"transport", row.operation == kCopy ? Json() : Json(transport)},
                                  {"bytes", row.bytes},
                                  {"calls", seconds.size()},
                                  {"time_s", spread_of(seconds)},
                                  {"round_medians_s", row.round_medians.at(transport)},
                                  {"bytes_per_s", rate(row, transport)}});
    if (row.operation == kCopy || transports.size() < 2) continue;
    Json ratios = {{"operation", row.operation}, {"bytes", row.bytes}};
    for (std::size_t i = 1; i < transports.size(); ++i)
      ratios[transports[0] + "_time_over_" + transports[i]] = rate(row, transports[i]) / rate(row, transports[0]);
    document["ratios"].push_back(ratios);
  }
  return document;
}

std::string text_of(const Setup& setup, const std::vector<Row>& rows, const std::vector<std::string>& transports,
                    std::size_t columns) {
  using report::Align;
  std::string text =
      machine_line() + "\nlibzero " ZERO_VERSION ", libtorch " TORCH_VERSION "\n" + std::to_string(setup.world) +
      " ranks, " + setup.dtype + ", threads a rank " + std::to_string(setup.threads) + ", " +
      std::to_string(setup.rounds) +
      " rounds; a size is that of the whole tensor, used again by every call; GB/s its bytes by the median\n";
  std::vector<report::Column> names{{"size"}};
  for (const auto& transport : transports)
    for (const char* what : {" ms", "min", "p99", "GB/s"})
      names.push_back({*what == ' ' ? transport + what : std::string(what), Align::Right});
  for (std::size_t i = 1; i < transports.size(); ++i)
    names.push_back({transports[0] + "/" + transports[i], Align::Right});
  names.push_back({"memcpy GB/s", Align::Right});
  const auto ms = [](double s) { return fixed(s * 1e3, 3); };
  std::map<std::int64_t, double> copies;
  for (const auto& row : rows)
    if (row.operation == kCopy) copies[row.bytes] = rate(row, kCopy);
  for (auto row = rows.begin(); row != rows.end();) {
    report::Table table(names);
    const auto operation = row->operation;
    for (; row != rows.end() && row->operation == operation; ++row) {
      if (operation == kCopy) continue;
      std::vector<std::string> cells{report::human_bytes(static_cast<std::uint64_t>(row->bytes))};
      for (const auto& transport : transports) {
        const auto& seconds = row->seconds.at(transport);
        for (const double q : {0.5, 0.0, 0.99}) cells.push_back(ms(quantile(seconds, q)));
        cells.push_back(fixed(rate(*row, transport) * 1e-9, 2));
      }
      for (std::size_t i = 1; i < transports.size(); ++i)
        cells.push_back(fixed(rate(*row, transports[i]) / rate(*row, transports[0]), 3));
      cells.push_back(fixed(copies[row->bytes] * 1e-9, 2));
      table.row(cells);
    }
    if (operation != kCopy) text += "\n" + operation + "\n" + table.render(columns);
  }
  return text + "\nall results exact\n";
}

}  // namespace
}  // namespace collectives_bench

int bench_collectives(int argc, char** argv) {
  using namespace collectives_bench;
  Setup setup;
  Command command(kName, "time of collectives by size and transport, compared with memcpy; all results are checked",
                  "[options]", "  zero bench collectives --operations all_gather --largest 16777216\n");
  declare(command, setup);
  if (!command.parse(argc, argv)) return 0;
  const auto& global = command.global();
  auto transports = list_of("--transports", setup.transports, {"shm", "gloo", kLibrary});
  auto rows = rows_of(setup);

  const auto own = Communicator::from_env();
  const bool launched = own->size() > 1;
  install_log_sink(kName, global);
  if (launched && (command.given("--world") || command.given("--transports")))
    throw ConfigError(
        "[--world, --transports] got a value, expected none: the launcher's ranks are used. Hint: set ZERO_TRANSPORT.");
  if (!command.given("--world")) setup.world = launched ? own->size() : 2;
  if (launched) transports = {own->transport()};
  const bool speaks = own->rank() == 0;

  Json task = {{"dtype", setup.dtype}, {"threads", setup.threads}, {"library", false}, {"rows", Json::array()}};
  for (const auto& row : rows) task["rows"].push_back(Json::array({row.operation, row.bytes}));
  for (std::int64_t round = 0; round < setup.rounds; ++round) {
    for (std::size_t i = 0; i < transports.size(); ++i) {
      const auto& transport = transports[in_turn(round, i, transports.size())];
      if (speaks && log_threshold(global) <= LogLevel::Info)
        print_note(kName, LogLevel::Info,
                   "round " + std::to_string(round + 1) + " of " + std::to_string(setup.rounds) + ": " + transport);
      Json result;
      if (launched) {
        result = measure_rows(task, *own);
      } else {
        const RankProcesses ranks{.command = kName,
                                  .world = setup.world,
                                  .threads = setup.threads,
                                  .transport = transport == kLibrary ? "shm" : transport};  // how its ranks rendezvous
        task["library"] = transport == kLibrary;
        auto outcome = run_rank_processes(ranks, task, global);
        if (outcome.exit_code != 0) return outcome.exit_code;
        result = std::move(outcome.result);
      }
      for (std::size_t r = 0; r < rows.size(); ++r) {
        const std::string key = rows[r].operation == kCopy ? kCopy : transport;
        const auto seconds = result.at("rows").at(r).at("seconds").get<std::vector<double>>();
        auto& all = rows[r].seconds[key];
        all.insert(all.end(), seconds.begin(), seconds.end());
        rows[r].round_medians[key].push_back(quantile(seconds, 0.5));
      }
    }
  }
  if (!speaks) return 0;
  if (global.json) {
    print_result(document_of(setup, rows, transports).dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  } else {
    print_result(
        text_of(setup, rows, transports, static_cast<std::size_t>(report::describe_terminal(1, global.color).columns)));
  }
  return 0;
}

int bench_collectives_rank(int argc, char** argv) {
  using namespace collectives_bench;
  const auto task = RankTask::from("collectives-rank", argc, argv);
  const auto comm = Communicator::from_env();
  const auto result = measure_rows(task.task, *comm);
  if (comm->rank() == 0) task.hand_over(result);
  return 0;
}

}  // namespace zero::cli
