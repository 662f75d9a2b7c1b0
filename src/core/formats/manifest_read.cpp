// Reads manifest.json of formats 1 and 2. See manifest.h.
#include <charconv>
#include <cmath>

#include "base/check.h"
#include "formats/files.h"
#include "formats/hash.h"
#include "formats/json.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"

namespace zero::formats {
namespace {

constexpr std::int64_t kMostRanks = 1 << 20;
constexpr int kDepth = 8;

double number_of(const JsonView& view) {
  const auto text = view.text();
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value))
    view.fail("is not a finite number in a string");
  return value;
}

std::string hash_in(const JsonView& view) {
  auto text = view.text();
  if (!is_hash(text)) view.fail("is not a hash of 32 lower-case hex digits");
  return text;
}

std::vector<std::int64_t> counts_in(const JsonView& view, std::size_t expected) {
  std::vector<std::int64_t> result;
  for (const auto& item : view.items()) result.push_back(item.count());
  if (result.size() != expected) view.fail(base::join("has ", result.size(), " numbers, expected ", expected));
  return result;
}

std::vector<std::vector<Box>> slices_in(const JsonView& view, std::size_t dims) {
  std::vector<std::vector<Box>> slices;
  for (const auto& slice : view.items()) {
    slices.emplace_back();
    for (const auto& box : slice.items()) {
      box.has_only({"start", "size"});
      slices.back().push_back({counts_in(box.at("start"), dims), counts_in(box.at("size"), dims)});
    }
  }
  if (slices.empty()) view.fail("has no slices");
  return slices;
}

// Tensors are read while the text is parsed, before the list of files is known.
class Tensors {
 public:
  Tensor read(const JsonView& view) {
    const bool sliced = view.raw().is_object() && view.raw().contains("slices");
    if (sliced)
      view.has_only({"kind", "name", "dtype", "shape", "requires_grad", "parts", "slices"});
    else
      view.has_only({"kind", "name", "dtype", "shape", "requires_grad", "parts"});
    Tensor tensor;
    tensor.kind = view.at("kind").text();
    tensor.name = view.at("name").text();
    tensor.dtype = view.at("dtype").text();
    if (!valid_key(tensor.kind) || !valid_key(tensor.name))
      view.fail("has a kind or name that is empty, too long or not printable");
    if (bits_of(tensor.dtype) == 0 || bits_of(tensor.dtype) % 8 != 0)
      view.fail("has the unknown dtype \"" + tensor.dtype + "\"");
    const auto sizes = view.at("shape").items();
    if (sizes.size() > 64) view.fail("has more than 64 dimensions");
    for (const auto& size : sizes) tensor.shape.push_back(size.count());
    tensor.requires_grad = view.at("requires_grad").boolean();
    if (sliced) tensor.slices = slices_in(view.at("slices"), tensor.shape.size());
    const auto parts = view.at("parts");
    if (!parts.raw().is_array()) parts.fail("is not an array");
    tensor.parts.reserve(parts.raw().size());
    for (std::size_t i = 0; i < parts.raw().size(); ++i) {
      const auto& item = parts.raw()[i];
      if (item.is_array())
        tensor.parts.push_back(part_in(item, parts, i));
      else
        add_old_part({item, view.path(), base::join(parts.place(), "/", i)}, tensor);
    }
    return tensor;
  }

  // All parts are written as the format has them, and those of format 1 get the numbers of their files.
  void finish(Manifest& m, const std::string& path) {
    if (m.format == 2 ? old_ : new_)
      fail_damaged(path, base::join("has parts of another format than ", m.format, ", which it says it has"));
    if (m.format == 2) return;
    std::map<std::string, std::uint32_t> listed;
    for (const auto& file : m.files) listed.emplace(file.name, static_cast<std::uint32_t>(listed.size()));
    const auto number = [&](std::vector<Tensor>& tensors) {
      for (auto& tensor : tensors)
        for (auto& part : tensor.parts) {
          const auto found = listed.find(names_[part.file]);
          if (found == listed.end())
            fail_damaged(path, tensor.kind + " " + tensor.name + ": its file " + names_[part.file] + " is not listed");
          part.file = found->second;
        }
    };
    number(m.tensors);
    for (auto& own : m.ranks) number(own);
  }

 private:
  // [file, offset, start, numel]
  Part part_in(const Json& item, const JsonView& parts, std::size_t index) {
    new_ = true;
    std::uint64_t numbers[4] = {};
    bool valid = item.size() == 4;
    for (std::size_t i = 0; valid && i < 4; ++i) {
      valid = item[i].is_number_unsigned();
      if (valid) numbers[i] = item[i].get<std::uint64_t>();
      valid = valid && numbers[i] <= static_cast<std::uint64_t>(i == 0   ? UINT32_MAX
                                                                : i == 3 ? kMostPartBytes
                                                                         : INT64_MAX);
    }
    if (!valid)
      parts.fail(base::join("has the item ", index, ", which is not file, offset, start and numel of at most ",
                            kMostPartBytes));
    return {static_cast<std::uint32_t>(numbers[0]), static_cast<std::int32_t>(numbers[3]), numbers[1],
            static_cast<std::int64_t>(numbers[2])};
  }

  void add_old_part(const JsonView& item, Tensor& tensor) {
    old_ = true;
    item.has_only({"file", "key", "start", "numel", "hash"});
    const auto name = item.at("file").text();
    if (!valid_file_name(name)) item.at("file").fail("is not a plain file name");
    const Part part{numbers_.emplace(name, static_cast<std::uint32_t>(names_.size())).first->second,
                    static_cast<std::int32_t>(item.at("numel").count(kMostPartBytes)), 0, item.at("start").count()};
    tensor.hashes.push_back(hash_in(item.at("hash")));
    if (part.file == names_.size()) names_.push_back(name);
    if (item.at("key").text() != key_of(tensor.kind, tensor.name, part.start))
      item.at("key").fail("is not the one of its kind, name and start");
    tensor.parts.push_back(part);
  }

  bool old_ = false, new_ = false;
  std::vector<std::string> names_;  // of format 1, in order of appearance
  std::map<std::string, std::uint32_t> numbers_;
};

std::map<std::string, std::string> texts_in(const JsonView& view) {
  std::map<std::string, std::string> result;
  for (const auto& [key, value] : view.fields()) result[key] = value.text();
  return result;
}

// What formats 1 and 2 have in common.
void read_run(const JsonView& top, std::int64_t reader, Manifest& m) {
  const auto writer = top.at("writer").has_only({"libzero", "libtorch"});
  m.libzero_version = writer.at("libzero").text();
  m.libtorch_version = writer.at("libtorch").text();
  m.tag = top.at("tag").text();
  if (!valid_tag(m.tag)) top.at("tag").fail("is not a tag");
  m.seq = top.at("seq").count(kMostCount);
  m.id = hash_in(top.at("id"));
  m.created = top.at("created").text();
  const auto step = top.at("step").has_only({"global_steps", "applied_steps", "skipped_steps", "global_samples"});
  m.global_steps = step.at("global_steps").count(kMostCount);
  m.applied_steps = step.at("applied_steps").count(kMostCount);
  m.skipped_steps = step.at("skipped_steps").count(kMostCount);
  m.global_samples = step.at("global_samples").count(kMostCount);
  const auto optimizer = top.at("optimizer").has_only({"type", "slots"});
  m.optimizer = optimizer.at("type").text();
  for (const auto& slot : optimizer.at("slots").items()) m.slots.push_back(slot.text());
  const auto scaler = top.at("scaler").has_only({"scale", "hysteresis", "good", "floor"});
  m.loss_scale = number_of(scaler.at("scale"));
  if (m.loss_scale <= 0) scaler.at("scale").fail("is not above 0");
  m.hysteresis = scaler.at("hysteresis").count(kMostCount);
  const auto good = scaler.at("good");
  m.good = reader >= 5 && good.raw().is_number_integer() && good.raw() == -1 ? -1 : good.count(kMostCount);
  m.floor = scaler.at("floor").count(kMostCount);
  const auto world =
      top.at("world").has_only({"size", "stage", "recipe", "transport", "torch_threads", "cpu_capability"});
  m.world = world.at("size").count(kMostRanks);
  m.stage = world.at("stage").count(3);
  const auto recipe = world.at("recipe").has_only({"parameter", "gradient", "wire"});
  m.parameter_dtype = recipe.at("parameter").text();
  m.gradient_dtype = recipe.at("gradient").text();
  m.wire_dtype = recipe.at("wire").text();
  m.transport = world.at("transport").text();
  m.torch_threads = world.at("torch_threads").count();
  m.cpu_capability = world.at("cpu_capability").text();
  m.config = texts_in(top.at("config"));
  m.config_hash = top.at("config_hash").text();
  m.user_state = top.at("user_state").text();
  for (const auto& item : top.at("files").items()) {
    item.has_only({"name", "bytes", "hash"});
    m.files.push_back({item.at("name").text(), item.at("bytes").count(), hash_in(item.at("hash"))});
    if (!valid_file_name(m.files.back().name)) item.at("name").fail("is not a plain file name");
  }
  m.aliases = texts_in(top.at("aliases"));
}

void read_program(const JsonView& top, Manifest& m) {
  const auto program = top.at("program").has_only({"rates", "missed_steps"});
  for (const auto& rate : program.at("rates").items()) m.set_rates.push_back(number_of(rate));
  for (const auto& [name, count] : program.at("missed_steps").fields()) m.missed_steps[name] = count.count(kMostCount);
}

void read_mesh(const JsonView& top, Manifest& m) {
  const auto mesh = top.at("mesh").has_only({"dp", "sp", "tp"});
  m.sequence = mesh.at("sp").count(kMostRanks);
  m.tensor = mesh.at("tp").count(kMostRanks);
  if (mesh.at("dp").count(kMostRanks) * m.sequence * m.tensor != m.world)
    mesh.fail(base::join("has other numbers of ranks than the ", m.world, " of the run"));
}

// Readers of version 5 also read what the checkpoint holds.
void read_format_2(const JsonView& top, std::int64_t reader, Manifest& m) {
  std::vector<const char*> fields{"format",      "min_reader", "writer",  "tag",       "seq",    "id",
                                  "created",     "step",       "batch",   "optimizer", "scaler", "world",
                                  "mesh",        "files",      "blocks",  "tensors",   "config", "aliases",
                                  "config_hash", "user_state", "program", "ranks"};
  if (reader >= 5) fields.push_back("content");
  top.has_only(fields);
  if (reader >= 5) {
    const auto content = top.at("content").text();
    if (content != kTrainingContent && content != kWeightsContent)
      top.at("content").fail("is neither \"training\" nor \"weights\"");
    m.weights_only = content == kWeightsContent;
  }
  read_program(top, m);
  read_mesh(top, m);
  const auto batch = top.at("batch").has_only({"global", "micro", "accumulation"});
  m.global_batch = batch.at("global").count(kMostCount);
  m.micro_batch = batch.at("micro").count(kMostCount);
  m.accumulation = batch.at("accumulation").count(kMostCount);
  m.blocks = top.at("blocks").text();
}

// Readers of version 2 also read what the program set, those of version 3 also meshes.
void read_format_1(const JsonView& top, std::int64_t reader, Manifest& m) {
  std::vector<const char*> fields{"format",      "min_reader", "writer",    "tag",     "seq",     "id",
                                  "created",     "step",       "optimizer", "scaler",  "world",   "config",
                                  "config_hash", "user_state", "files",     "tensors", "aliases", "ranks"};
  if (reader >= 2) fields.push_back("program");
  if (reader >= 3) fields.push_back("mesh");
  top.has_only(fields);
  if (reader >= 2) read_program(top, m);
  if (reader >= 3) read_mesh(top, m);
}

}  // namespace

std::vector<Tensor> parse_tensors(std::string_view text, const std::string& path) {
  const auto json = parse_json(text, path, kDepth);
  std::vector<Tensor> result;
  Tensors tensors;
  for (const auto& item : JsonView(json, path).items()) result.push_back(tensors.read(item));
  return result;
}

Manifest parse_manifest(std::string text, const std::string& path, Extent extent) {
  Manifest m;
  // Fails later, when it is known that the format is one of these.
  std::string fault;
  Tensors tensors;
  std::map<std::size_t, std::vector<Tensor>> ranks;
  const auto read = [&](const std::string& place, const Json& value) {
    const bool shared = place.starts_with("/tensors/");
    if ((!shared && !place.starts_with("/ranks/")) || place.rfind('/') != (shared ? 8 : place.find('/', 7)))
      return true;
    std::size_t rank = 0;
    const auto* const digits = place.data() + (shared ? 9 : 7);
    const auto* const end = place.data() + (shared ? place.size() : place.find('/', 7));
    if (const auto read = std::from_chars(digits, end, rank); read.ec != std::errc() || read.ptr != end) return true;
    if (!fault.empty()) return false;
    try {
      auto tensor = tensors.read({value, path, place});
      if (shared)
        m.tensors.push_back(std::move(tensor));
      else
        ranks[rank].push_back(std::move(tensor));
    } catch (const IoError& e) {
      fault = e.what();
    }
    return false;
  };
  const auto json = parse_json(text, path, kDepth, read);
  std::string().swap(text);  // an assignment would keep its memory
  const JsonView top(json, path);
  // Checked first, because later versions may have a different structure.
  const auto format = top.at("format").text();
  const auto reader = top.at("min_reader").count();
  if (format == "zero.checkpoint/1" && reader < 4)
    m.format = 1;
  else if (format == "zero.checkpoint/2" && (reader == 4 || reader == 5))
    m.format = 2;
  else if (reader > kReaderVersion)
    fail_damaged(path, base::join("needs a reader of version ", reader, ", this libzero reads version ", kReaderVersion,
                                  ". Hint: load it with the libzero that wrote it, or a newer one."));
  else
    fail_damaged(path, base::join("has the format \"", format, "\" for readers of version ", reader,
                                  ", expected \"zero.checkpoint/1\" or \"zero.checkpoint/2\""));
  if (!fault.empty()) throw IoError(fault, ExitCode::kCheckpoint);
  read_run(top, reader, m);
  if (m.format == 2)
    read_format_2(top, reader, m);
  else
    read_format_1(top, reader, m);
  if (const auto rest = top.at("tensors").items(); !rest.empty()) rest[0].fail("is not an object");
  const auto lists = top.at("ranks").items();
  for (std::size_t r = 0; r < lists.size(); ++r) {
    if (const auto rest = lists[r].items(); !rest.empty()) rest[0].fail("is not an object");
    m.ranks.push_back(std::move(ranks[r]));
  }
  tensors.finish(m, path);
  prove_coverage(m, path, extent);
  return m;
}

}  // namespace zero::formats
