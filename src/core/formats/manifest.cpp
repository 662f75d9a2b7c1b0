#include "formats/manifest.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <tuple>

#include "base/check.h"
#include "formats/files.h"
#include "formats/hash.h"
#include "formats/json.h"
#include "formats/safetensors.h"

namespace zero::formats {
namespace {

constexpr const char* kFormat = "zero.checkpoint/1";
constexpr std::int64_t kMostRanks = 1 << 20;

bool is_word(char c) { return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); }

bool is_name(std::string_view text, std::size_t longest, bool underscore_first) {
  return !text.empty() && text.size() <= longest && (is_word(text[0]) || (underscore_first && text[0] == '_')) &&
         std::all_of(text.begin(), text.end(), [](char c) { return is_word(c) || c == '.' || c == '_' || c == '-'; });
}

// The shortest text that reads back to the same bits.
std::string text_of(double value) {
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  return {buffer, end};
}

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

Json json_of(const std::vector<std::vector<Box>>& slices) {
  Json list = Json::array();
  for (const auto& slice : slices) {
    Json boxes = Json::array();
    for (const auto& box : slice) boxes.push_back({{"start", box.start}, {"size", box.size}});
    list.push_back(std::move(boxes));
  }
  return list;
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

Json json_of(const Tensor& tensor) {
  Json parts = Json::array();
  for (const auto& part : tensor.parts)
    parts.push_back(
        {{"file", part.file}, {"key", part.key}, {"start", part.start}, {"numel", part.numel}, {"hash", part.hash}});
  Json json = {{"kind", tensor.kind},
               {"name", tensor.name},
               {"dtype", tensor.dtype},
               {"shape", tensor.shape},
               {"requires_grad", tensor.requires_grad},
               {"parts", parts}};
  if (!tensor.slices.empty()) json["slices"] = json_of(tensor.slices);
  return json;
}

Tensor tensor_in(const JsonView& view) {
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
  for (const auto& item : view.at("parts").items()) {
    item.has_only({"file", "key", "start", "numel", "hash"});
    Part part{item.at("file").text(), item.at("key").text(), item.at("start").count(), item.at("numel").count(),
              hash_in(item.at("hash"))};
    if (!valid_file_name(part.file)) item.at("file").fail("is not a plain file name");
    if (!valid_key(part.key)) item.at("key").fail("is empty, too long or not printable");
    tensor.parts.push_back(std::move(part));
  }
  return tensor;
}

std::map<std::string, std::string> texts_in(const JsonView& view) {
  std::map<std::string, std::string> result;
  for (const auto& [key, value] : view.fields()) result[key] = value.text();
  return result;
}

// The lines of a text that ends with a newline.
std::vector<std::string_view> lines_of(std::string_view text, const std::string& path) {
  if (text.empty() || text.back() != '\n') fail_damaged(path, "does not end with a newline");
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const auto end = text.find('\n');
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  return lines;
}

}  // namespace

bool valid_tag(std::string_view tag) { return is_name(tag, 128, false) && tag != kLatestName; }

bool valid_file_name(std::string_view name) {
  return is_name(name, 255, true) && name.find("..") == std::string_view::npos;
}

std::string rank_file_name(int rank) {
  const auto digits = std::to_string(rank);
  return "rank-" + std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits + ".safetensors";
}

std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  std::int64_t product = 1;
  bool zero = false;
  for (const auto size : shape) {
    if (size < 0) return -1;
    if (size == 0)
      zero = true;
    else if (__builtin_mul_overflow(product, size, &product))
      return -1;
  }
  return zero ? 0 : product;
}

std::string key_of(const std::string& kind, const std::string& name, std::int64_t start) {
  return base::join(kind, "/", name, "@", start);
}

std::string manifest_text(const Manifest& m) {
  Json files = Json::array(), tensors = Json::array(), ranks = Json::array();
  for (const auto& file : m.files) files.push_back({{"name", file.name}, {"bytes", file.bytes}, {"hash", file.hash}});
  for (const auto& tensor : m.tensors) tensors.push_back(json_of(tensor));
  for (const auto& own : m.ranks) {
    Json list = Json::array();
    for (const auto& tensor : own) list.push_back(json_of(tensor));
    ranks.push_back(std::move(list));
  }
  Json rates = Json::array();
  for (const double rate : m.set_rates) rates.push_back(text_of(rate));
  const bool programmed = !m.set_rates.empty() || !m.missed_steps.empty();
  const bool meshed = m.sequence > 1 || m.tensor > 1;
  Json json = {{"format", kFormat},
               {"min_reader", meshed       ? 3
                              : programmed ? 2
                                           : 1},
               {"writer", {{"libzero", m.libzero_version}, {"libtorch", m.libtorch_version}}},
               {"tag", m.tag},
               {"seq", m.seq},
               {"id", m.id},
               {"created", m.created},
               {"step",
                {{"global_steps", m.global_steps},
                 {"applied_steps", m.applied_steps},
                 {"skipped_steps", m.skipped_steps},
                 {"global_samples", m.global_samples}}},
               {"optimizer", {{"type", m.optimizer}, {"slots", m.slots}}},
               {"scaler",
                {{"scale", text_of(m.loss_scale)}, {"hysteresis", m.hysteresis}, {"good", m.good}, {"floor", m.floor}}},
               {"world",
                {{"size", m.world},
                 {"stage", m.stage},
                 {"recipe", {{"parameter", m.parameter_dtype}, {"gradient", m.gradient_dtype}, {"wire", m.wire_dtype}}},
                 {"transport", m.transport},
                 {"torch_threads", m.torch_threads},
                 {"cpu_capability", m.cpu_capability}}},
               {"config", m.config},
               {"config_hash", m.config_hash},
               {"user_state", m.user_state},
               {"files", files},
               {"tensors", tensors},
               {"aliases", m.aliases},
               {"ranks", ranks}};
  if (meshed) json["mesh"] = {{"dp", m.world / (m.sequence * m.tensor)}, {"sp", m.sequence}, {"tp", m.tensor}};
  if (programmed || meshed) json["program"] = {{"rates", rates}, {"missed_steps", m.missed_steps}};
  try {
    return json.dump(1) + "\n";
  } catch (const Json::exception&) {
    throw ConfigError(
        "[save_checkpoint] a name or the user state is not valid UTF-8. Hint: encode binary user state as text.");
  }
}

std::string tensors_text(const std::vector<Tensor>& tensors) {
  Json list = Json::array();
  for (const auto& tensor : tensors) list.push_back(json_of(tensor));
  try {
    return list.dump();
  } catch (const Json::exception&) {
    throw ConfigError("[save_checkpoint] a tensor's name is not valid UTF-8. Hint: rename the module or parameter.");
  }
}

std::vector<Tensor> parse_tensors(std::string_view text, const std::string& path) {
  const auto json = parse_json(text, path, 8);
  std::vector<Tensor> tensors;
  for (const auto& item : JsonView(json, path).items()) tensors.push_back(tensor_in(item));
  return tensors;
}

Manifest parse_manifest(std::string_view text, const std::string& path) {
  const auto json = parse_json(text, path, 8);
  const JsonView top(json, path);
  // Checked first, because later versions may have a different structure.
  if (const auto format = top.at("format").text(); format != kFormat)
    fail_damaged(path, "has the format \"" + format + "\", expected \"" + kFormat + "\"");
  if (const auto needed = top.at("min_reader").count(); needed > kReaderVersion)
    fail_damaged(path, base::join("needs a reader of version ", needed, ", this libzero reads version ", kReaderVersion,
                                  ". Hint: load it with the libzero that wrote it, or a newer one."));
  Manifest m;
  const auto reader = top.at("min_reader").count();
  if (reader >= 2) {
    if (reader >= 3)
      top.has_only({"format",     "min_reader", "writer", "tag",     "seq",     "id",     "created",
                    "step",       "optimizer",  "scaler", "world",   "mesh",    "config", "config_hash",
                    "user_state", "program",    "files",  "tensors", "aliases", "ranks"});
    else
      top.has_only({"format", "min_reader", "writer", "tag", "seq", "id", "created", "step", "optimizer", "scaler",
                    "world", "config", "config_hash", "user_state", "program", "files", "tensors", "aliases", "ranks"});
    const auto program = top.at("program").has_only({"rates", "missed_steps"});
    for (const auto& rate : program.at("rates").items()) m.set_rates.push_back(number_of(rate));
    for (const auto& [name, count] : program.at("missed_steps").fields())
      m.missed_steps[name] = count.count(kMostCount);
  } else {
    top.has_only({"format", "min_reader", "writer", "tag", "seq", "id", "created", "step", "optimizer", "scaler",
                  "world", "config", "config_hash", "user_state", "files", "tensors", "aliases", "ranks"});
  }
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
  m.good = scaler.at("good").count(kMostCount);
  m.floor = scaler.at("floor").count(kMostCount);
  const auto world =
      top.at("world").has_only({"size", "stage", "recipe", "transport", "torch_threads", "cpu_capability"});
  m.world = world.at("size").count(kMostRanks);
  m.stage = world.at("stage").count(3);
  if (reader >= 3) {
    const auto mesh = top.at("mesh").has_only({"dp", "sp", "tp"});
    m.sequence = mesh.at("sp").count(kMostRanks);
    m.tensor = mesh.at("tp").count(kMostRanks);
    if (mesh.at("dp").count(kMostRanks) * m.sequence * m.tensor != m.world)
      mesh.fail(base::join("has other numbers of ranks than the ", m.world, " of the run"));
  }
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
  for (const auto& item : top.at("tensors").items()) m.tensors.push_back(tensor_in(item));
  m.aliases = texts_in(top.at("aliases"));
  for (const auto& list : top.at("ranks").items()) {
    m.ranks.emplace_back();
    for (const auto& item : list.items()) m.ranks.back().push_back(tensor_in(item));
  }
  prove_coverage(m, path);
  return m;
}

namespace {

// Whether two boxes have a common element.
bool overlap(const Box& a, const Box& b) {
  for (std::size_t d = 0; d < a.start.size(); ++d)
    if (a.start[d] + a.size[d] <= b.start[d] || b.start[d] + b.size[d] <= a.start[d]) return false;
  return true;
}

// Every box is compared with all others.
constexpr std::size_t kMostBoxes = 16384;

// Every element of the tensor is in exactly one box.
void prove_slices(const Tensor& tensor, const std::string& label, const std::string& path) {
  std::vector<const Box*> boxes;
  std::int64_t covered = 0;
  for (const auto& slice : tensor.slices)
    for (const auto& box : slice) {
      for (std::size_t d = 0; d < tensor.shape.size(); ++d)
        if (box.start[d] > tensor.shape[d] || box.size[d] > tensor.shape[d] - box.start[d])
          fail_damaged(path, label + " has a slice outside of its shape");
      const auto numel = numel_of(box.size);
      if (numel == 0) continue;
      if (boxes.size() == kMostBoxes) fail_damaged(path, base::join(label, " has more than ", kMostBoxes, " slices"));
      for (const auto* other : boxes)
        if (overlap(box, *other)) fail_damaged(path, label + " has slices that overlap");
      boxes.push_back(&box);
      covered += numel;
    }
  if (covered != numel_of(tensor.shape))
    fail_damaged(path, base::join(label, " has slices of ", covered, " of ", numel_of(tensor.shape), " elements"));
}

}  // namespace

void prove_coverage(const Manifest& m, const std::string& path) {
  std::set<std::string> files;
  for (const auto& file : m.files)
    if (!files.insert(file.name).second || file.name == kManifestName || file.name == kSumsName)
      fail_damaged(path, "lists the file " + file.name + " twice, or it is one of the format's own");
  if (m.world < 1 || static_cast<std::int64_t>(m.ranks.size()) != m.world)
    fail_damaged(path, base::join("has the private state of ", m.ranks.size(), " ranks, expected ", m.world));
  std::set<std::pair<std::string, std::string>> keys;
  const auto check = [&](const Tensor& tensor) {
    const auto label = tensor.kind + " " + tensor.name;
    const auto numel = numel_of(tensor.shape);
    const auto bytes = bits_of(tensor.dtype) / 8;
    if (numel < 0 || bytes == 0) fail_damaged(path, label + " has a shape or dtype that cannot be");
    if (!tensor.slices.empty()) prove_slices(tensor, label, path);
    std::int64_t next = 0;
    for (const auto& part : tensor.parts) {
      if (part.start != next)
        fail_damaged(path, base::join(label, ": a part begins at element ", part.start, ", expected ", next,
                                      ": elements are missing or stored twice"));
      if (part.numel < 1 || part.numel > numel - next || part.numel > kMostPartBytes / bytes)
        fail_damaged(path, base::join(label, ": the part at ", part.start, " has ", part.numel, " of ", numel,
                                      " elements, expected 1 to ", std::min(numel - next, kMostPartBytes / bytes)));
      if (files.count(part.file) == 0) fail_damaged(path, label + ": its file " + part.file + " is not listed");
      if (!keys.insert({part.file, part.key}).second)
        fail_damaged(path, label + ": the key " + part.key + " is used twice");
      next += part.numel;
    }
    if (next != numel) fail_damaged(path, base::join(label, ": ", next, " of ", numel, " elements are stored"));
  };
  const auto unique = [&](const std::vector<Tensor>& tensors) {
    std::set<std::pair<std::string, std::string>> names;
    for (const auto& tensor : tensors) {
      if (!names.insert({tensor.kind, tensor.name}).second)
        fail_damaged(path, "has " + tensor.kind + " " + tensor.name + " twice");
      check(tensor);
    }
  };
  unique(m.tensors);
  for (const auto& own : m.ranks) unique(own);
}

std::string sums_text(const Manifest& manifest, const std::string& manifest_hash) {
  std::string text;
  for (const auto& file : manifest.files) text += file.hash + "  " + file.name + "\n";
  return text + manifest_hash + "  " + kManifestName + "\n";
}

std::map<std::string, std::string> parse_sums(std::string_view text, const std::string& path) {
  std::map<std::string, std::string> result;
  std::string last;
  for (const auto line : lines_of(text, path)) {
    if (line.size() < 35 || !is_hash(line.substr(0, 32)) || line.substr(32, 2) != "  ")
      fail_damaged(path, "has a line that is not \"<hash>  <name>\"");
    last = line.substr(34);
    if (!valid_file_name(last)) fail_damaged(path, "has a line whose name is not a plain file name");
    if (!result.emplace(last, line.substr(0, 32)).second) fail_damaged(path, "lists " + last + " twice");
  }
  if (last != kManifestName) fail_damaged(path, std::string("does not end with ") + kManifestName);
  return result;
}

std::string latest_text(const Latest& latest) {
  const auto head = base::join(latest.tag, "\nseq ", latest.seq, "\n");
  return head + "xxh128 " + hash_of(head) + "\n";
}

Latest parse_latest(std::string_view text, const std::string& path) {
  const auto lines = lines_of(text, path);
  Latest latest;
  if (lines.size() == 3 && lines[1].starts_with("seq ")) {
    const auto digits = lines[1].substr(4);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), latest.seq);
    latest.tag = lines[0];
    // Serializes again and compares: only one spelling is valid, including the hash.
    if (error == std::errc() && end == digits.data() + digits.size() && latest.seq >= 0 && valid_tag(latest.tag) &&
        latest_text(latest) == text)
      return latest;
  }
  fail_damaged(path, "is not the three lines of tag, seq and hash");
}

}  // namespace zero::formats
