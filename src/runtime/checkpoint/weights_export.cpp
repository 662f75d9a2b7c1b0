// See weights.h: export_weights().
#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <numeric>
#include <optional>
#include <sstream>
#include <string_view>
#include <tuple>

#include "base/check.h"
#include "base/gathered_values.h"
#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/weights.h"
#include "engine/rank_agreement.h"
#include "formats/slices.h"
#include "interchange/crc32.h"
#include "interchange/element_types.h"
#include "interchange/native_source.h"
#include "interchange/output_files.h"
#include "interchange/page_writer.h"
#include "interchange/weights_plan.h"
#include "observe/status_page.h"

namespace zero::checkpoint {
namespace {
using namespace interchange;

constexpr std::int64_t kExportWindow = std::int64_t{1} << 20;  // elements that are read at once
constexpr std::int64_t kPanelsBytes = std::int64_t{8} << 20;   // of all panels that are put together at a time
constexpr std::int64_t kLeastPanelBytes = std::int64_t{1} << 20;

bool holds_values(const std::string& kind) { return kind == "master" || kind == kFrozen; }

// Bytes for every rank, and what the ranks sent to this one. Its memory is kept for the next exchange.
class Exchange {
 public:
  explicit Exchange(comm::Group& comm) : comm_(comm) {}
  // The place of the bytes for the ranks, one after another.
  char* begin(const std::vector<std::int64_t>& bytes) {
    sent_ = bytes;
    return bytes_of(in_, std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}));
  }
  // Collective. Part p of the result came from rank p; valid until the next begin().
  std::vector<std::string_view> swap() {
    std::vector<std::int64_t> received;
    for (const auto& theirs : base::all_gather_lists(comm_, sent_))
      received.push_back(theirs.at(static_cast<std::size_t>(comm_.rank())));
    const auto total = [](const std::vector<std::int64_t>& all) {
      return std::accumulate(all.begin(), all.end(), std::int64_t{0});
    };
    const auto* from = bytes_of(in_, total(sent_));
    if (comm_.size() > 1) {
      from = bytes_of(out_, total(received));
      comm_.all_to_all(out_.narrow(0, 0, total(received)), in_.narrow(0, 0, total(sent_)), received, sent_)->wait();
    }
    std::vector<std::string_view> parts;
    for (const auto bytes : received) {
      parts.emplace_back(from, static_cast<std::size_t>(bytes));
      from += bytes;
    }
    return parts;
  }

 private:
  static char* bytes_of(at::Tensor& tensor, std::int64_t bytes) {
    if (!tensor.defined() || tensor.numel() < bytes) tensor = at::empty({bytes}, at::kByte);
    return reinterpret_cast<char*>(tensor.mutable_data_ptr<std::uint8_t>());
  }

  comm::Group& comm_;
  std::vector<std::int64_t> sent_;
  at::Tensor in_, out_;
};

// Converted elements that follow each other with a stride in a panel.
struct RunHead {
  std::int64_t to, stride, numel;
};

class Exporter {
 public:
  Exporter(engine::State& state, const std::vector<formats::Tensor>& tensors, const WeightsPlan& plan,
           const ExportOptions& options)
      : state_(state), comm_(*state.job.comm), tensors_(tensors), plan_(plan), own_(tensors.size()) {
    std::map<std::pair<std::string, std::string>, std::size_t> places;
    for (std::size_t t = 0; t < tensors.size(); ++t) places[{tensors[t].kind, tensors[t].name}] = t;
    pieces_ = state.exports.pieces_to_save();
    for (auto& piece : pieces_)
      if (const auto found = options.change.find(piece.name); found != options.change.end() && holds_values(piece.kind))
        add_change(piece, found->second);
    for (const auto& piece : pieces_) {
      if (piece.kind == kBuffer && comm_.rank() > 0) continue;  // every rank has all of it
      if (const auto found = places.find({piece.kind, piece.name}); found != places.end())
        own_[found->second].push_back(&piece);
    }
    for (auto& list : own_)
      std::sort(list.begin(), list.end(), [](const auto* a, const auto* b) { return a->begin < b->begin; });
  }

  // [local] What has its order already.
  void write_in_place(PageWriter& pages) {
    for (const auto t : in_order())
      if (!is_moved(t)) write_in_place(t, pages);
  }

  // [collective] The rest, but for parts of pages. Errors are kept: other ranks need this one in their exchanges.
  void put_together(PageWriter& pages) {
    std::vector<std::size_t> moved;
    for (const auto t : in_order())
      if (is_moved(t)) moved.push_back(t);
    put_together(moved, pages);
  }

  template <class Part>
  void keeping(const Part& part) {
    if (fault_) return;
    try {
      part();
    } catch (...) {
      fault_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (fault_) std::rethrow_exception(fault_);
  }

  // After all ranks succeeded.
  void require_whole() const { ZERO_CHECK(missing_ == 0, "no rank has ", missing_, " elements of panels"); }
  const std::map<std::string, std::int64_t>& overflows() const { return overflows_; }

  // CRC-32 of ranges of tensors: "tensor first-byte bytes crc" by line.
  std::string crcs() const { return crcs_; }

 private:
  template <class Change>
  static void add_change(engine::StatePiece& piece, const Change& change) {
    piece.dtype = at::kFloat;
    piece.read = [read = piece.read, first = piece.begin, &change](std::int64_t at, std::int64_t numel) {
      const auto values = read(at, numel).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
      change(first + at, {values.template mutable_data_ptr<float>(), static_cast<std::size_t>(numel)});
      return values;
    };
  }

  // So that files are written from front to back.
  std::vector<std::size_t> in_order() const {
    std::vector<std::size_t> order(plan_.tensors.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      const auto& x = plan_.layout.places[a];
      const auto& y = plan_.layout.places[b];
      return std::tie(x.file, x.offset) < std::tie(y.file, y.offset);
    });
    return order;
  }

  const MappedTensor& mapped(std::size_t t) const { return plan_.mapping.tensors[plan_.from[t]]; }

  bool is_moved(std::size_t t) const {
    const auto& tensor = mapped(t);
    return tensor.moves_elements() ||
           std::any_of(tensor.segments.begin(), tensor.segments.end(),
                       [&](const Segment& one) { return !tensors_[one.source].slices.empty(); });
  }

  // Converted bytes of elements [at, at + numel) of a piece.
  void convert(const engine::StatePiece& piece, std::int64_t at, std::int64_t numel, const OutTensor& tensor,
               std::string& out) {
    const auto data = piece.read(at, numel).contiguous();
    out.resize(static_cast<std::size_t>(numel * width_of(tensor.dtype)));
    const auto result =
        convert_elements(data.const_data_ptr(), file_dtype(piece.dtype, piece.name), numel, out.data(), tensor.dtype);
    if (result.overflows > 0) overflows_[tensor.name] += result.overflows;
  }

  void add(std::size_t t, std::int64_t element, const std::string& bytes, PageWriter& pages) {
    const auto& place = plan_.layout.places[t];
    const auto at = static_cast<std::uint64_t>(element * width_of(plan_.tensors[t].dtype));
    pages.add(place.file, place.offset + at, bytes.data(), bytes.size());
    if (!plan_.torch.empty())
      crcs_ += base::join(t, " ", at, " ", bytes.size(), " ", crc32(0, bytes.data(), bytes.size()), "\n");
  }

  void write_in_place(std::size_t t, PageWriter& pages) {
    observe::status_page().set_unit(plan_.tensors[t].name);
    std::string bytes;
    std::int64_t begin = 0;  // of the segment, in the target
    for (const auto& segment : mapped(t).segments) {
      for (const auto* const piece : own_[segment.source]) {
        const auto end = std::min(piece->begin + piece->numel, segment.begin + segment.numel());
        for (auto at = std::max(piece->begin, segment.begin); at < end; at += kExportWindow) {
          convert(*piece, at - piece->begin, std::min(kExportWindow, end - at), plan_.tensors[t], bytes);
          add(t, begin + at - segment.begin, bytes, pages);
        }
      }
      begin += segment.numel();
    }
  }

  struct Panel {
    std::size_t tensor;
    std::int64_t begin, end;  // elements of the target
  };

  void put_together(const std::vector<std::size_t>& moved, PageWriter& pages) {
    const auto ranks = static_cast<std::size_t>(comm_.size());
    const auto most = std::max(kLeastPanelBytes, kPanelsBytes / comm_.size());
    std::vector<Panel> panels;
    for (const auto t : moved) {
      const auto numel = formats::numel_of(plan_.tensors[t].shape);
      // Whole rows, so that the runs of a panel are long.
      const auto cols = std::max<std::int64_t>(1, mapped(t).segments.front().cols);
      const auto step = std::max<std::int64_t>(1, most / width_of(plan_.tensors[t].dtype) / cols) * cols;
      for (std::int64_t begin = 0; begin < numel; begin += step)
        panels.push_back({t, begin, std::min(numel, begin + step)});
    }
    Exchange exchange(comm_);
    for (std::size_t first = 0; first < panels.size(); first += ranks) {
      const auto count = std::min(ranks, panels.size() - first);
      std::vector<std::int64_t> bytes(ranks, 0);
      for (std::size_t r = 0; r < count && !fault_; ++r)
        for_own_runs(panels[first + r], [&](const engine::StatePiece&, std::int64_t, const RunHead& head) {
          bytes[r] += static_cast<std::int64_t>(sizeof head) +
                      head.numel * width_of(plan_.tensors[panels[first + r].tensor].dtype);
        });
      auto* to = exchange.begin(bytes);
      keeping([&] {
        for (std::size_t r = 0; r < count; ++r) to = fill_own_part(panels[first + r], to);
      });
      if (fault_) exchange.begin(std::vector<std::int64_t>(ranks, 0));
      const auto received = exchange.swap();
      const auto mine = first + static_cast<std::size_t>(comm_.rank());
      if (mine < panels.size()) keeping([&] { write_panel(panels[mine], received, pages); });
    }
  }

  // Calls take(piece, at, head) for this rank's elements of a panel: from element `at` of the piece.
  template <class Take>
  void for_own_runs(const Panel& panel, const Take& take) {
    for_each_run(mapped(panel.tensor), panel.begin, panel.end, [&](const ElementRun& run) {
      const auto& source = tensors_[run.source];
      for (const auto& stored : formats::runs_between(source.shape, {}, source.slices, run.from, run.from + run.numel))
        for (const auto* const piece : own_[run.source]) {
          const auto begin = std::max(stored.stored, piece->begin);
          const auto end = std::min(stored.stored + stored.numel, piece->begin + piece->numel);
          const auto element = run.to + (stored.wanted + (begin - stored.stored) - run.from) * run.stride;
          if (begin < end) take(*piece, begin - piece->begin, RunHead{element - panel.begin, run.stride, end - begin});
        }
    });
  }

  // Heads and converted elements; returns the end.
  char* fill_own_part(const Panel& panel, char* to) {
    observe::status_page().set_unit(plan_.tensors[panel.tensor].name);
    const auto& tensor = plan_.tensors[panel.tensor];
    const auto width = width_of(tensor.dtype);
    const engine::StatePiece* read = nullptr;  // elements [begin, end) of it are in `window_`
    std::int64_t begin = 0, end = 0;
    for_own_runs(panel, [&](const engine::StatePiece& piece, std::int64_t at, const RunHead& head) {
      std::memcpy(to, &head, sizeof head);
      to += sizeof head;
      const auto dtype = file_dtype(piece.dtype, piece.name);
      for (const auto last = at + head.numel; at < last;) {
        if (read != &piece || at < begin || at >= end) {
          // Runs near each other are read at once; those of a panel far apart are a few windows.
          read = &piece;
          begin = at;
          end = std::min(piece.numel, at + kExportWindow / 4);
          read_raw(piece, begin, end - begin, window_);
        }
        const auto count = std::min(last, end) - at;
        const auto result =
            convert_elements(window_.data() + (at - begin) * width_of(dtype), dtype, count, to, tensor.dtype);
        if (result.overflows > 0) overflows_[tensor.name] += result.overflows;
        to += count * width;
        at += count;
      }
    });
    return to;
  }

  static void read_raw(const engine::StatePiece& piece, std::int64_t at, std::int64_t numel, std::string& out) {
    const auto data = piece.read(at, numel).contiguous();
    out.assign(static_cast<const char*>(data.const_data_ptr()), data.nbytes());
  }

  void write_panel(const Panel& panel, const std::vector<std::string_view>& received, PageWriter& pages) {
    const auto width = width_of(plan_.tensors[panel.tensor].dtype);
    panel_.resize(static_cast<std::size_t>((panel.end - panel.begin) * width));
    std::int64_t filled = 0;
    for (const auto part : received)
      for (std::size_t at = 0; at < part.size();) {
        RunHead head{};
        std::memcpy(&head, part.data() + at, sizeof head);
        at += sizeof head;
        scatter(part.data() + at, head.numel, static_cast<int>(width), panel_.data() + head.to * width, head.stride);
        at += static_cast<std::size_t>(head.numel * width);
        filled += head.numel;
      }
    add(panel.tensor, panel.begin, panel_, pages);
    missing_ += panel.end - panel.begin - filled;  // a rank failed, which it says in the next agreement
  }

  engine::State& state_;
  comm::Group& comm_;
  const std::vector<formats::Tensor>& tensors_;
  const WeightsPlan& plan_;
  std::vector<engine::StatePiece> pieces_;
  std::vector<std::vector<const engine::StatePiece*>> own_;  // by tensor, in order
  std::string window_, panel_;                               // kept for the next panel
  std::exception_ptr fault_;
  std::int64_t missing_ = 0;  // elements of panels
  std::map<std::string, std::int64_t> overflows_;
  std::string crcs_;
};

// CRC-32 of whole tensors from those of all ranks' ranges.
std::vector<std::uint32_t> joined_crcs(const std::vector<std::string>& texts, std::size_t tensors) {
  struct Range {
    std::size_t tensor;
    std::uint64_t begin, bytes;
    std::uint32_t crc;
  };
  std::vector<Range> ranges;
  for (const auto& text : texts) {
    std::istringstream in(text);
    for (Range range{}; in >> range.tensor >> range.begin >> range.bytes >> range.crc;) ranges.push_back(range);
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return std::tie(a.tensor, a.begin) < std::tie(b.tensor, b.begin); });
  std::vector<std::uint32_t> crcs(tensors, 0);
  for (const auto& range : ranges) crcs[range.tensor] = crc32_joined(crcs[range.tensor], range.crc, range.bytes);
  return crcs;
}

std::string options_text(const std::string& path, const ExportOptions& options) {
  auto text =
      base::join(path, "\n", options.format, "\n", options.dtype, "\n", options.names, "\n", options.prefix, "\n",
                 options.shard_bytes, "\n", options.duplicate_tied, options.allow_overflow, "\n", options.heads);
  for (const auto& field : options.config) text += "\n" + field;
  text += "\n" + options.stem;
  for (const auto& pattern : options.only) text += "\nonly " + pattern;
  for (const auto& [name, contents] : options.extra_files) text += base::join("\n", name, " ", contents.size());
  for (const auto& [name, change] : options.change) text += "\nchange " + name;
  return text;
}

struct ExportPhase {
  ExportPhase() { observe::status_page().set_phase(observe::StatusPhase::Save); }
  ~ExportPhase() {
    observe::status_page().set_unit("");
    observe::status_page().set_phase(observe::StatusPhase::Idle);
  }
};

// What is written and where: every rank computes the same.
struct Planned {
  std::vector<formats::Tensor> tensors;
  std::optional<WeightsPlan> plan;
};

// Parts of a parameter that is cut over ranks are numbered by the part, which a change knows nothing of.
void check_changes(const std::vector<formats::Tensor>& tensors, const ExportOptions& options) {
  for (const auto& [name, change] : options.change)
    if (std::none_of(tensors.begin(), tensors.end(), [&, &name = name](const formats::Tensor& one) {
          return one.name == name && one.slices.empty() && holds_values(one.kind);
        }))
      throw ConfigError("[export_weights] got ExportOptions::change for " + name +
                        ", expected names of parameters that are not cut by tensor parallelism");
}

// dtypes: of the parameters in the files, by name, where the options have none.
Planned plan_export(engine::State& state, formats::FsOps& fs, const ExportOptions& options, const char* where,
                    bool frozen, const std::map<std::string, std::string>& dtypes = {}) {
  Planned planned;
  (void)engine::agree(*state.job.comm, where, [&] {
    const bool universal = options.format == "universal";
    auto manifest = manifest_of(state);
    planned.tensors = std::move(manifest.tensors);
    std::erase_if(planned.tensors, [&](const formats::Tensor& one) {
      return (!universal && is_slot(one.kind)) || (!frozen && one.kind == kFrozen);
    });
    // The order of a checkpoint's tensors, so that the files are those of an export of one.
    std::sort(planned.tensors.begin(), planned.tensors.end(), [](const formats::Tensor& a, const formats::Tensor& b) {
      return std::tie(a.kind, a.name) < std::tie(b.kind, b.name);
    });
    check_changes(planned.tensors, options);
    std::vector<SourceTensor> sources;
    for (const auto& one : planned.tensors) {
      const auto found = dtypes.find(one.name);
      const bool given = holds_values(one.kind) && found != dtypes.end();
      sources.push_back({one.kind, one.name, given ? found->second : one.dtype, one.shape});
    }
    std::optional<NameMap> map;
    if (!options.names.empty()) map = NameMap::find(fs, options.names);
    const auto* const names = map ? &*map : nullptr;
    planned.plan = universal
                       ? plan_universal(sources, manifest.aliases, progress_of(manifest), names, options, "the engine")
                       : plan_weights(sources, manifest.aliases, names, options, "the engine");
    return "";
  });
  return planned;
}

// Fills files that rank 0 has made. Returns the numbers of values that fp16 cannot hold, by tensor.
std::map<std::string, std::int64_t> write_planned(engine::State& state, formats::FsOps& fs, const Planned& planned,
                                                  const ExportOptions& options, const std::string& folder,
                                                  const std::vector<std::string>& names, const char* where) {
  auto& comm = *state.job.comm;
  const auto& plan = *planned.plan;
  (void)engine::agree(comm, where, [&] {
    for (const auto& name : names) {
      const auto file = std::filesystem::path(folder) / name;
      if (!std::filesystem::exists(file.parent_path()) ||
          !formats::Folder::open(fs, file.parent_path().string()).exists(file.filename().string()))
        throw ConfigError(base::join("[", where, "] this rank does not see ", file.string(),
                                     ", which rank 0 made. Hint: write to a file system that all hosts share."));
    }
    return "";
  });

  OutputWriter writer(fs, folder, names);
  PageWriter pages(writer, comm.size());
  Exporter exporter(state, planned.tensors, plan, options);
  (void)engine::agree_while_moving(comm, where, formats::bytes_moved(), [&] {
    exporter.write_in_place(pages);
    return "";
  });
  exporter.put_together(pages);
  std::map<std::string, std::int64_t> overflows;
  const auto faults = engine::agree(comm, where, [&] {
    exporter.rethrow();
    std::string text;
    for (const auto& [name, count] : exporter.overflows()) text += base::join(count, " ", name, "\n");
    return text;
  });
  for (const auto& text : faults) {
    std::istringstream in(text);
    std::int64_t count = 0;
    for (std::string name; in >> count && in.get() && std::getline(in, name);) overflows[name] += count;
  }
  (void)engine::agree(comm, where, [&] {
    exporter.require_whole();
    check_overflows(overflows, options);
    return "";
  });
  if (!plan.torch.empty()) {
    const auto texts = engine::agree(comm, where, [&] { return exporter.crcs(); });
    if (comm.rank() == 0)
      exporter.keeping([&] {
        const auto crcs = joined_crcs(texts, plan.tensors.size());
        for (std::size_t file = 0; file < plan.torch.size(); ++file) {
          auto fixed = plan.layout.files[file].fixed;
          for (auto& header : closing_bytes(plan, file, crcs)) fixed.push_back(std::move(header));
          std::sort(fixed.begin(), fixed.end());
          for (const auto& [offset, text] : fixed) pages.add(file, offset, text.data(), text.size());
        }
      });
  }
  Exchange exchange(comm);
  const auto parts = pages.finish();
  std::vector<std::int64_t> bytes;
  for (const auto& part : parts) bytes.push_back(static_cast<std::int64_t>(part.size()));
  auto* to = exchange.begin(bytes);
  for (const auto& part : parts) to = std::copy(part.begin(), part.end(), to);
  const auto received = exchange.swap();
  (void)engine::agree_while_moving(comm, where, formats::bytes_moved(), [&] {
    exporter.rethrow();
    for (const auto part : received) pages.take(part);
    writer.close();
    return "";
  });
  return overflows;
}

// Files that appear under a path.
struct Target {
  std::string path;
  bool replace = false, frozen = true;
  std::map<std::string, std::string> dtypes = {};  // as of plan_export()
};

ExportReport export_to(engine::State& state, formats::FsOps& fs, const Target& target, const ExportOptions& options,
                       const char* where) {
  const ExportPhase phase;
  const at::NoGradGuard no_grad;
  auto& comm = *state.job.comm;
  const auto label = base::join("[", where, "]");
  state.stepper.flush();
  engine::agree_on(state.relay, comm, where, label + " the arguments", [&] {
    state.checks.require_boundary(where);
    state.checks.require_no_scope(where, /*reading_too=*/false);
    return options_text(target.path, options) + (target.frozen ? "" : "\nwithout frozen parameters");
  });
  if (state.parts.experts) state.parts.experts->share_buffers();
  const auto planned = plan_export(state, fs, options, where, target.frozen, target.dtypes);
  const auto& plan = *planned.plan;

  // Rank 0 makes the files at their size; all must see them.
  std::optional<OutputFiles> files;
  const auto made = engine::agree(comm, where, [&]() -> std::string {
    if (comm.rank() != 0) return "";
    files.emplace(fs, target.path, plan.one_file ? OutputFiles::Kind::File : OutputFiles::Kind::Folder, label.c_str(),
                  target.replace);
    auto empty = plan.layout.files;
    for (std::size_t file = 0; file < plan.torch.size(); ++file)
      empty[file].fixed.clear();  // their pages hold tensors as well
    files->create(empty);
    std::string text = files->folder();
    for (const auto& name : files->names()) text += "\n" + name;
    return text;
  });
  std::vector<std::string> names;
  std::istringstream lines(made[0]);
  for (std::string line; std::getline(lines, line);) names.push_back(line);
  const auto folder = names.front();
  names.erase(names.begin());
  (void)write_planned(state, fs, planned, options, folder, names, where);
  (void)engine::agree_while_moving(comm, where, formats::bytes_moved(), [&] {
    if (comm.rank() == 0) files->commit();
    return "";
  });
  ExportReport report;
  for (const auto& file : plan.layout.files) report.files.push_back(plan.one_file ? target.path : file.name);
  for (const auto& tensor : plan.tensors) report.bytes += static_cast<std::int64_t>(tensor.bytes());
  report.tensors = static_cast<std::int64_t>(plan.tensors.size());
  report.remarks = plan.remarks;
  return report;
}

// For the dtypes in which forward reads the parameters. What fp16 cannot hold is infinite there, too.
ExportOptions options_of_recipe() {
  ExportOptions options;
  options.dtype = "";
  options.allow_overflow = true;
  return options;
}

}  // namespace

ExportReport export_weights(engine::State& state, formats::FsOps& fs, const std::string& path,
                            const ExportOptions& options) {
  return export_to(state, fs, {path}, options, "export_weights");
}

ExportReport save_16bit_model(engine::State& state, formats::FsOps& fs, const std::string& folder,
                              const std::string& name, bool exclude_frozen) {
  constexpr const char* kSave16 = "save_16bit_model";
  (void)engine::agree(*state.job.comm, kSave16, [&] {
    if (folder.empty() || !formats::valid_file_name(name))
      throw ConfigError("[save_16bit_model] got the directory \"" + folder + "\" and the file name \"" + name +
                        "\", expected a directory and a plain name such as pytorch_model.bin");
    return "";
  });
  auto options = options_of_recipe();
  options.format = "pt";
  return export_to(state, fs,
                   {folder + "/" + name, /*replace=*/true, /*frozen=*/!exclude_frozen, dtypes_in_forward(state)},
                   options, kSave16);
}

std::vector<std::string> write_weight_files(engine::State& state, formats::FsOps& fs, const std::string& folder,
                                            const char* where) {
  auto& comm = *state.job.comm;
  const auto options = options_of_recipe();
  const auto planned = plan_export(state, fs, options, where, /*frozen=*/true, dtypes_in_forward(state));
  std::vector<std::string> names;
  for (const auto& file : planned.plan->layout.files) names.push_back(file.name);
  (void)engine::agree_while_moving(comm, where, formats::bytes_moved(), [&] {
    if (comm.rank() != 0) return "";
    const auto into = formats::Folder::open(fs, folder);
    for (const auto& file : planned.plan->layout.files) create_out_file(into, file.name, file);
    return "";
  });
  const auto overflows = write_planned(state, fs, planned, options, folder, names, where);
  if (!overflows.empty() && comm.rank() == 0)
    base::log(LogLevel::Warning, base::join("[", where, "] fp16 cannot hold values of ", overflows.size(),
                                            overflows.size() == 1 ? " tensor" : " tensors",
                                            ", which are infinite in the exported weights: ", overflows.begin()->first,
                                            overflows.size() == 1 ? "" : ", ..."));
  return names;
}

}  // namespace zero::checkpoint
