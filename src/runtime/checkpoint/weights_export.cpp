// See weights.h: export_weights().
#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <numeric>
#include <optional>
#include <sstream>
#include <tuple>

#include "base/check.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/weights.h"
#include "engine/rank_agreement.h"
#include "formats/slices.h"
#include "interchange/crc32.h"
#include "interchange/element_types.h"
#include "interchange/output_files.h"
#include "interchange/page_writer.h"
#include "interchange/weights_plan.h"
#include "observe/status_page.h"

namespace zero::checkpoint {
namespace {
using namespace interchange;

constexpr const char* kWhere = "export_weights";
constexpr std::int64_t kWindow = std::int64_t{1} << 20;        // elements that are read at once
constexpr std::int64_t kPanelsBytes = std::int64_t{16} << 20;  // of all panels that are put together at a time
constexpr std::int64_t kLeastPanelBytes = std::int64_t{1} << 20;

// Part p of the result came from rank p. Collective.
std::vector<std::string> swap_parts(comm::Group& comm, const std::vector<std::string>& parts) {
  if (comm.size() == 1) return parts;
  std::string sizes;
  std::vector<std::int64_t> in_numels, out_numels;
  for (const auto& part : parts) {
    sizes += std::to_string(part.size()) + " ";
    in_numels.push_back(static_cast<std::int64_t>(part.size()));
  }
  for (const auto& row : comm.all_gather_bytes(sizes)) {
    std::istringstream numbers(row);
    std::int64_t mine = 0;
    for (int r = 0; r <= comm.rank(); ++r) numbers >> mine;
    out_numels.push_back(mine);
  }
  const auto total = [](const std::vector<std::int64_t>& numels) {
    return std::accumulate(numels.begin(), numels.end(), std::int64_t{0});
  };
  auto in = at::empty({total(in_numels)}, at::kByte), out = at::empty({total(out_numels)}, at::kByte);
  auto* to = in.mutable_data_ptr<std::uint8_t>();
  for (const auto& part : parts) to = std::copy(part.begin(), part.end(), to);
  comm.all_to_all(out, in, out_numels, in_numels)->wait();
  std::vector<std::string> result;
  const auto* from = out.const_data_ptr<std::uint8_t>();
  for (const auto numel : out_numels) {
    result.emplace_back(reinterpret_cast<const char*>(from), static_cast<std::size_t>(numel));
    from += numel;
  }
  return result;
}

// Converted elements that follow each other with a stride in a panel.
struct RunHead {
  std::int64_t to, stride, numel;
};

class Exporter {
 public:
  Exporter(engine::State& state, const std::vector<formats::Tensor>& tensors, const WeightsPlan& plan)
      : state_(state), comm_(*state.parts.comm), tensors_(tensors), plan_(plan), own_(tensors.size()) {
    std::map<std::pair<std::string, std::string>, std::size_t> places;
    for (std::size_t t = 0; t < tensors.size(); ++t) places[{tensors[t].kind, tensors[t].name}] = t;
    pieces_ = state.exports->pieces_to_save();
    for (const auto& piece : pieces_) {
      if (piece.kind == kBuffer && comm_.rank() > 0) continue;  // every rank has all of it
      if (const auto found = places.find({piece.kind, piece.name}); found != places.end())
        own_[found->second].push_back(&piece);
    }
    for (auto& list : own_)
      std::sort(list.begin(), list.end(), [](const auto* a, const auto* b) { return a->begin < b->begin; });
  }

  // Everything but parts of pages. Errors are kept: other ranks need this one in their exchanges.
  void write(PageWriter& pages) {
    std::vector<std::size_t> order(plan_.tensors.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      const auto& x = plan_.layout.places[a];
      const auto& y = plan_.layout.places[b];
      return std::tie(x.file, x.offset) < std::tie(y.file, y.offset);
    });
    std::vector<std::size_t> moved;
    keeping([&] {
      for (const auto t : order)
        if (!is_moved(t)) write_in_place(t, pages);
    });
    for (const auto t : order)
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
    if (plan_.one_file)
      crcs_ += base::join(t, " ", at, " ", bytes.size(), " ", crc32(0, bytes.data(), bytes.size()), "\n");
  }

  void write_in_place(std::size_t t, PageWriter& pages) {
    observe::status_page().set_unit(plan_.tensors[t].name);
    std::string bytes;
    std::int64_t begin = 0;  // of the segment, in the target
    for (const auto& segment : mapped(t).segments) {
      for (const auto* const piece : own_[segment.source]) {
        const auto end = std::min(piece->begin + piece->numel, segment.begin + segment.numel());
        for (auto at = std::max(piece->begin, segment.begin); at < end; at += kWindow) {
          convert(*piece, at - piece->begin, std::min(kWindow, end - at), plan_.tensors[t], bytes);
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
    for (std::size_t first = 0; first < panels.size(); first += ranks) {
      std::vector<std::string> parts(ranks);
      keeping([&] {
        for (std::size_t r = 0; r < ranks && first + r < panels.size(); ++r) parts[r] = own_part(panels[first + r]);
      });
      if (fault_) parts.assign(ranks, "");
      const auto received = swap_parts(comm_, parts);
      const auto mine = first + static_cast<std::size_t>(comm_.rank());
      if (mine < panels.size()) keeping([&] { write_panel(panels[mine], received, pages); });
    }
  }

  // This rank's elements of a panel.
  std::string own_part(const Panel& panel) {
    observe::status_page().set_unit(plan_.tensors[panel.tensor].name);
    std::string part;
    const engine::StatePiece* read_piece = nullptr;  // elements [read_begin, read_end) of it are in `window`
    std::int64_t read_begin = 0, read_end = 0;
    std::string window;
    const auto& tensor = plan_.tensors[panel.tensor];
    const auto width = width_of(tensor.dtype);
    for_each_run(mapped(panel.tensor), panel.begin, panel.end, [&](const ElementRun& run) {
      const auto& source = tensors_[run.source];
      for (const auto& stored : formats::runs_between(source.shape, {}, source.slices, run.from, run.from + run.numel))
        for (const auto* const piece : own_[run.source]) {
          const auto begin = std::max(stored.stored, piece->begin);
          const auto end = std::min(stored.stored + stored.numel, piece->begin + piece->numel);
          for (auto at = begin; at < end;) {
            if (read_piece != piece || at < read_begin || at >= read_end) {
              // Runs near each other are read at once; those of a panel far apart are a few windows.
              read_piece = piece;
              read_begin = at;
              read_end = std::min(piece->begin + piece->numel, at + kWindow / 4);
              read_raw(*piece, read_begin - piece->begin, read_end - read_begin, window);
            }
            const auto count = std::min(end, read_end) - at;
            const auto element = run.to + (stored.wanted + (at - stored.stored) - run.from) * run.stride;
            const RunHead head{element - panel.begin, run.stride, count};
            part.append(reinterpret_cast<const char*>(&head), sizeof head);
            const auto old = part.size();
            part.resize(old + static_cast<std::size_t>(count * width));
            const auto dtype = file_dtype(piece->dtype, piece->name);
            const auto result = convert_elements(window.data() + (at - read_begin) * width_of(dtype), dtype, count,
                                                 part.data() + old, tensor.dtype);
            if (result.overflows > 0) overflows_[tensor.name] += result.overflows;
            at += count;
          }
        }
    });
    return part;
  }

  static void read_raw(const engine::StatePiece& piece, std::int64_t at, std::int64_t numel, std::string& out) {
    const auto data = piece.read(at, numel).contiguous();
    out.assign(static_cast<const char*>(data.const_data_ptr()), data.nbytes());
  }

  void write_panel(const Panel& panel, const std::vector<std::string>& received, PageWriter& pages) {
    const auto width = width_of(plan_.tensors[panel.tensor].dtype);
    std::string bytes(static_cast<std::size_t>((panel.end - panel.begin) * width), '\0');
    std::int64_t filled = 0;
    for (const auto& part : received)
      for (std::size_t at = 0; at < part.size();) {
        RunHead head{};
        std::memcpy(&head, part.data() + at, sizeof head);
        at += sizeof head;
        scatter(part.data() + at, head.numel, static_cast<int>(width), bytes.data() + head.to * width, head.stride);
        at += static_cast<std::size_t>(head.numel * width);
        filled += head.numel;
      }
    add(panel.tensor, panel.begin, bytes, pages);
    missing_ += panel.end - panel.begin - filled;  // a rank failed, which it says in the next agreement
  }

  engine::State& state_;
  comm::Group& comm_;
  const std::vector<formats::Tensor>& tensors_;
  const WeightsPlan& plan_;
  std::vector<engine::StatePiece> pieces_;
  std::vector<std::vector<const engine::StatePiece*>> own_;  // by tensor, in order
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
  return base::join(path, "\n", options.format, "\n", options.dtype, "\n", options.names, "\n", options.prefix, "\n",
                    options.shard_bytes, "\n", options.duplicate_tied, options.allow_overflow, "\n", options.heads);
}

struct ExportPhase {
  ExportPhase() { observe::status_page().set_phase(observe::StatusPhase::Save); }
  ~ExportPhase() {
    observe::status_page().set_unit("");
    observe::status_page().set_phase(observe::StatusPhase::Idle);
  }
};

}  // namespace

ExportReport export_weights(engine::State& state, formats::FsOps& fs, const std::string& path,
                            const ExportOptions& options) {
  const ExportPhase phase;
  const at::NoGradGuard no_grad;
  auto& comm = *state.parts.comm;
  state.stepper->flush();
  engine::agree_on(state.parts.relay, comm, kWhere, "[export_weights] the arguments", [&] {
    state.checks.require_boundary(kWhere);
    state.checks.require_no_scope(kWhere, /*reading_too=*/false);
    return options_text(path, options);
  });
  if (state.parts.experts) state.parts.experts->share_buffers();

  // What is written and where: every rank computes the same.
  std::vector<formats::Tensor> tensors;
  std::optional<WeightsPlan> plan;
  (void)engine::agree(comm, kWhere, [&] {
    tensors = tensors_of(state);
    std::erase_if(tensors, [](const formats::Tensor& one) { return one.kind.starts_with("opt."); });
    std::vector<SourceTensor> sources;
    for (const auto& one : tensors) sources.push_back({one.kind, one.name, one.dtype, one.shape});
    std::optional<NameMap> map;
    if (!options.names.empty()) map = NameMap::find(fs, options.names);
    plan = plan_weights(sources, state.exports->aliases(), map ? &*map : nullptr, options, "the engine");
    return "";
  });
  const bool torch = plan->one_file;

  // Rank 0 makes the files at their size; all must see them.
  std::optional<OutputFiles> files;
  const auto made = engine::agree(comm, kWhere, [&]() -> std::string {
    if (comm.rank() != 0) return "";
    files.emplace(fs, path, torch ? OutputFiles::Kind::File : OutputFiles::Kind::Folder, "[export_weights]");
    auto empty = plan->layout.files;
    if (torch) empty[0].fixed.clear();  // its pages hold tensors as well
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
  (void)engine::agree(comm, kWhere, [&] {
    const auto seen = formats::Folder::open(fs, folder);
    for (const auto& name : names)
      if (!seen.exists(name))
        throw ConfigError("[export_weights] this rank does not see " + seen.path_of(name) +
                          ", which rank 0 made. Hint: export to a file system that all hosts share.");
    return "";
  });

  OutputWriter writer(fs, folder, names);
  PageWriter pages(writer, comm.size());
  Exporter exporter(state, tensors, *plan);
  exporter.write(pages);
  std::map<std::string, std::int64_t> overflows;
  const auto faults = engine::agree(comm, kWhere, [&] {
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
  (void)engine::agree(comm, kWhere, [&] {
    exporter.require_whole();
    check_overflows(overflows, options);
    return "";
  });
  if (torch) {
    const auto crcs = engine::agree(comm, kWhere, [&] { return exporter.crcs(); });
    if (comm.rank() == 0)
      exporter.keeping([&] {
        auto fixed = plan->layout.files[0].fixed;
        for (auto& header : closing_bytes(*plan, 0, joined_crcs(crcs, plan->tensors.size())))
          fixed.push_back(std::move(header));
        std::sort(fixed.begin(), fixed.end());
        for (const auto& [offset, text] : fixed) pages.add(0, offset, text.data(), text.size());
      });
  }
  const auto received = swap_parts(comm, pages.finish());
  (void)engine::agree(comm, kWhere, [&] {
    exporter.rethrow();
    for (const auto& parts : received) pages.take(parts);
    writer.close();
    return "";
  });
  (void)engine::agree(comm, kWhere, [&] {
    if (comm.rank() == 0) files->commit();
    return "";
  });
  ExportReport report;
  for (const auto& file : plan->layout.files) report.files.push_back(torch ? path : file.name);
  for (const auto& tensor : plan->tensors) report.bytes += static_cast<std::int64_t>(tensor.bytes());
  report.tensors = static_cast<std::int64_t>(plan->tensors.size());
  report.remarks = plan->remarks;
  return report;
}

}  // namespace zero::checkpoint
