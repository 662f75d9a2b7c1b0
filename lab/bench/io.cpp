// `zero bench io`: throughput of a swap file by pattern, request size and depth, with every sector that is read
// checked. --fio alternates with that program within one run, so that changes of the disk's speed affect both equally.
// Streams are in io_measurement.h, the comparison in fio.h.
#include <zero/errors.h>
#include <zero/version.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "lab/bench/bench.h"
#include "lab/bench/fio.h"
#include "lab/bench/io_measurement.h"
#include "storage/storage_file.h"
#include "tools/report/text/progress.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/measurement.h"
#include "tools/support/options.h"

namespace zero::cli {
namespace io_bench {
namespace {

constexpr const char* kName = "bench io";
constexpr std::int64_t kSector = 4096;

struct Setup {
  std::string folder = ".", size = "1G", sizes = "64K,1M", depths = "1,8,32", patterns = "read,write,mixed",
              path = "probe";
  std::int64_t threads = 1, rounds = 5;
  double seconds = 1;
  bool fio = false;
};

// All rounds of one pattern with one request size and depth, in bytes per second.
struct Cell {
  IoPattern pattern;
  std::string word;
  storage::IoSettings settings;
  std::vector<double> own, fio;
  std::vector<double> reads, writes;  // libzero's, by direction
};

// "64K", "1M", "2G", "8192": a multiple of 4096.
std::int64_t bytes_of(const std::string& option, const std::string& text, std::int64_t most) {
  std::int64_t number = 0;
  const auto* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, number);
  const std::string_view unit(at, static_cast<std::size_t>(end - at));
  const int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (error != std::errc() || shift < 0 || number <= 0 || number > (most >> shift) || (number << shift) % kSector != 0)
    throw ConfigError("[" + option + "] got \"" + text.substr(0, 80) + "\", expected a multiple of 4096 bytes up to " +
                      std::to_string(most) + ", as 64K, 1M or 2G");
  return number << shift;
}

std::vector<Cell> cells_of(const Setup& setup, std::int64_t bytes) {
  const std::vector<std::string> known{"read", "write", "mixed"};
  const auto patterns = list_of("--patterns", setup.patterns, known);
  std::vector<Cell> cells;
  for (const auto& size : parts_of(setup.sizes)) {
    for (const auto& depth : parts_of(setup.depths)) {
      storage::IoSettings settings;
      settings.block_size = bytes_of("--block-sizes", size, 1 << 30);
      const auto [at, error] = std::from_chars(depth.data(), depth.data() + depth.size(), settings.queue_depth);
      if (error != std::errc() || at != depth.data() + depth.size() || settings.queue_depth < 1 ||
          settings.queue_depth > 4096)
        throw ConfigError("[--depths] got \"" + depth.substr(0, 80) +
                          "\", expected numbers from 1 to 4096 with commas between");
      settings.threads = static_cast<int>(setup.threads);
      settings.path = setup.path == "ring"      ? storage::IoSettings::Path::Ring
                      : setup.path == "threads" ? storage::IoSettings::Path::Threads
                                                : storage::IoSettings::Path::Probe;
      if (settings.block_size > bytes / 8)
        throw ConfigError("[--block-sizes] got " + size + ", expected at most an eighth of --size, " + setup.size);
      for (const auto& pattern : patterns) {
        const auto which = std::find(known.begin(), known.end(), pattern) - known.begin();
        cells.push_back({static_cast<IoPattern>(which), pattern, settings, {}, {}, {}, {}});
      }
    }
  }
  return cells;
}

double sum_of(const IoMeasurement::Result& result) { return result.read_bytes_per_s + result.write_bytes_per_s; }

double ratio_of(const Cell& cell) { return quantile(cell.own, 0.5) / quantile(cell.fio, 0.5); }

struct About {
  std::string description, file_system, notice, fio;
  std::int64_t bytes = 0;
};

Json document_of(const Setup& setup, const std::vector<Cell>& cells, const About& about) {
  Json document = {{"schema", "zero.bench.io/1"},
                   {"machine", machine()},
                   {"path", setup.folder},
                   {"file_system", about.file_system},
                   {"notice", about.notice.empty() ? Json() : Json(about.notice)},
                   {"io", about.description},
                   {"fio", about.fio.empty() ? Json() : Json(about.fio)},
                   {"size_bytes", about.bytes},
                   {"threads", setup.threads},
                   {"rounds", setup.rounds},
                   {"seconds", setup.seconds},
                   {"runs", Json::array()}};
  for (const auto& cell : cells) {
    Json run = {{"pattern", cell.word},
                {"block_bytes", cell.settings.block_size},
                {"depth", cell.settings.queue_depth},
                {"bytes_per_s", spread_of(cell.own)},
                {"read_bytes_per_s", quantile(cell.reads, 0.5)},
                {"write_bytes_per_s", quantile(cell.writes, 0.5)}};
    if (!cell.fio.empty()) {
      run["fio_bytes_per_s"] = spread_of(cell.fio);
      run["over_fio"] = ratio_of(cell);
    }
    document["runs"].push_back(run);
  }
  return document;
}

std::string text_of(const Setup& setup, const std::vector<Cell>& cells, const About& about, std::size_t columns) {
  using report::Align;
  std::string text = machine_line() + "\nlibzero " ZERO_VERSION + (about.fio.empty() ? "" : ", " + about.fio) + "\n" +
                     setup.folder + ": " + about.file_system + ", " + about.description + "\n" +
                     report::human_bytes(static_cast<std::uint64_t>(about.bytes)) + " a file, written once before; " +
                     std::to_string(setup.rounds) + " rounds of " + fixed(setup.seconds, 1) + " s; threads " +
                     std::to_string(setup.threads) + "; mixed is the sum of both directions\n\n";
  std::vector<report::Column> names{
      {"pattern"},           {"block", Align::Right}, {"depth", Align::Right}, {"GB/s", Align::Right},
      {"min", Align::Right}, {"max", Align::Right}};
  if (!about.fio.empty())
    for (const char* name : {"fio GB/s", "min", "max", "zero/fio"}) names.push_back({name, Align::Right});
  report::Table table(names);
  const auto spread = [](std::vector<std::string>& words, const std::vector<double>& rates) {
    for (const double q : {0.5, 0.0, 1.0}) words.push_back(fixed(quantile(rates, q) * 1e-9, 3));
  };
  for (const auto& cell : cells) {
    std::vector<std::string> words{cell.word, report::human_bytes(static_cast<std::uint64_t>(cell.settings.block_size)),
                                   std::to_string(cell.settings.queue_depth)};
    spread(words, cell.own);
    if (!cell.fio.empty()) {
      spread(words, cell.fio);
      words.push_back(fixed(ratio_of(cell), 3));
    }
    table.row(words);
  }
  text += table.render(columns);
  if (!about.fio.empty()) {
    double least = ratio_of(cells.front());
    for (const auto& cell : cells) least = std::min(least, ratio_of(cell));
    text += "\nleast ratio " + fixed(least, 3);
  }
  return text + "\nall bytes that were read were the last ones written\n";
}

void declare(Command& c, Setup& s) {
  c.section("What is measured");
  c.option("--path", s.folder, "DIR", "folder of the file (the working directory)");
  c.option("--size", s.size, "BYTES", "size of the file, such as 512M or 4G (1G)");
  c.option("--block-sizes", s.sizes, "LIST", "bytes per request, comma-separated (64K,1M)");
  c.option("--depths", s.depths, "LIST", "requests in flight per thread (1,8,32)");
  c.option("--patterns", s.patterns, "LIST", "read, write, mixed (all)");
  c.option("--threads", s.threads, "N", "I/O threads (1)", 1, 64);
  c.choice("--io", s.path, {"probe", "ring", "threads"},
           "io_uring, pread and pwrite in threads, or what works (probe)");
  c.option("--seconds", s.seconds, "S", "seconds per window (1)", 0.05, 3600.0);
  c.option("--rounds", s.rounds, "N", "windows per measurement (5)", 1, 1000);
  c.flag("--fio", s.fio, "alternate with the program fio (apt install fio)");
}

}  // namespace
}  // namespace io_bench

int bench_io(int argc, char** argv) {
  using namespace io_bench;
  Setup setup;
  Command command(kName, "speed of offload files by request size and depth; all data read is checked", "[options]",
                  "  zero bench io --path /mnt/nvme --fio\n");
  declare(command, setup);
  if (!command.parse(argc, argv)) return 0;
  const auto& global = command.global();
  install_log_sink(kName, global);
  const auto bytes = bytes_of("--size", setup.size, std::int64_t{1} << 44);
  auto cells = cells_of(setup, bytes);
  About about{"", storage::file_system_of(setup.folder), storage::folder_notice(setup.folder), "", bytes};
  if (!about.notice.empty()) print_note(kName, LogLevel::Warning, about.notice);

  const auto screen = report::describe_terminal(2, global.color);
  report::ProgressLine::Settings line;
  line.enabled = report::progress_wanted(screen, 0, global.progress, global.json, global.quiet);
  line.dumb = screen.dumb;
  line.columns = screen.columns;
  line.utf8 = screen.utf8;
  report::ProgressLine progress(line);
  const auto windows = static_cast<std::int64_t>(cells.size()) * setup.rounds;
  std::int64_t done = 0;

  std::optional<Fio> fio;
  if (setup.fio) {
    fio.emplace(setup.folder, bytes);
    about.fio = fio->version();
  }
  for (auto cell = cells.begin(); cell != cells.end();) {
    // Cells with the same request size and depth share a file.
    IoMeasurement own(setup.folder, bytes, cell->settings);
    const auto& first = cell->settings;
    for (; cell != cells.end() && cell->settings.block_size == first.block_size &&
           cell->settings.queue_depth == first.queue_depth;
         ++cell) {
      for (std::int64_t round = 0; round < setup.rounds; ++round) {
        progress.update(done++, windows,
                        cell->word + " " + std::to_string(cell->settings.block_size) + " x " +
                            std::to_string(cell->settings.queue_depth));
        const auto measure_own = [&] {
          const auto result = own.run(cell->pattern, setup.seconds);
          cell->own.push_back(sum_of(result));
          cell->reads.push_back(result.read_bytes_per_s);
          cell->writes.push_back(result.write_bytes_per_s);
        };
        if (round % 2 == 0) measure_own();
        if (fio) cell->fio.push_back(sum_of(fio->run(cell->pattern, cell->settings, setup.seconds)));
        if (round % 2 != 0) measure_own();
      }
    }
    own.check_all();
    about.description = own.description();
  }
  progress.finish();
  if (global.json) {
    print_result(document_of(setup, cells, about).dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  } else {
    print_result(
        text_of(setup, cells, about, static_cast<std::size_t>(report::describe_terminal(1, global.color).columns)));
  }
  return 0;
}

}  // namespace zero::cli
