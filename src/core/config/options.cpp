// Options, the interface of a document.
#include <zero/options.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>

#include <xxhash.h>

#include "base/check.h"
#include "base/hex.h"
#include "base/printable.h"
#include "config/batch.h"
#include "config/document.h"
#include "config/json_reader.h"
#include "config/optimizers.h"

namespace zero {
namespace config {

const Entry* Document::find(std::string_view path) const {
  const auto found = entries.find(path);
  return found == entries.end() ? nullptr : &found->second;
}

bool Document::is_set(std::string_view path) const {
  const Entry* entry = find(path);
  return entry && !entry->automatic;
}

std::string Document::effective(const Key& key) const {
  const Entry* entry = find(key.path);
  if (entry && !entry->automatic) return entry->value.json();
  return key.json && optimizer_type() != OptimizerType::None ? key.json(default_settings(optimizer_type()))
                                                             : key.default_json;
}

OptimizerType Document::optimizer_type() const {
  const Entry* optimizer = find("optimizer.type");
  return optimizer ? optimizer_named(optimizer->value.text).value_or(OptimizerType::None) : OptimizerType::None;
}

Place Document::place(std::string_view path) const {
  const Entry* entry = find(path);
  return entry ? entry->place : Place{};
}

std::shared_ptr<const Document> read_document(std::shared_ptr<const Source> source, std::vector<Setting> overrides,
                                              Faults& faults) {
  auto document = std::make_shared<Document>();
  document->source = std::move(source);
  document->overrides = std::move(overrides);
  read_entries(*document, faults);
  // Refused values are not entries, so these checks use the defaults instead.
  check_entries(*document, faults);
  Faults not_built;
  list_not_built(*document, not_built);
  document->not_built = not_built.sorted();
  for (const auto& fault : faults.sorted())
    if (fault.severity == ConfigFault::Severity::Notice) document->notices.push_back(fault);
  if (!faults.has_errors()) document->settings = typed_settings(*document);
  return document;
}

namespace {

std::string read_text(const std::filesystem::path& file) {
  std::ostringstream text;
  if (file == "-") {
    text << std::cin.rdbuf();
    return text.str();
  }
  errno = 0;
  std::ifstream in(file, std::ios::binary);
  if (!in || std::filesystem::is_directory(file))
    throw IoError("[Options::from_file] cannot read \"" + base::printable(file.string(), base::Lines::Escape) +
                      "\": " + (std::filesystem::is_directory(file) ? "it is a directory" : std::strerror(errno)) +
                      ". Hint: give the path of a JSON configuration.",
                  ExitCode::kConfig);
  // One byte more than the limit shows that the file is too large.
  std::string bytes(kMaxFileBytes + 1, '\0');
  in.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  bytes.resize(static_cast<std::size_t>(in.gcount()));
  return bytes;
}

std::shared_ptr<const Document> document_or_throw(std::shared_ptr<const Source> source,
                                                  std::vector<Setting> overrides) {
  Faults faults;
  const std::string name = source->name;
  auto document = read_document(std::move(source), std::move(overrides), faults);
  if (faults.has_errors()) {
    std::vector<ConfigFault> errors;
    for (auto& fault : faults.sorted())
      if (fault.severity == ConfigFault::Severity::Error) errors.push_back(std::move(fault));
    throw ConfigError("[Options] the configuration cannot be used:\n" + faults_text(errors, name));
  }
  return document;
}

}  // namespace

const char* ranks_name(const Settings& settings) {
  return settings.mesh.tensor * settings.mesh.sequence > 1 ? "data-parallel ranks" : "ranks";
}

MeshShape mesh_shape(const Options& options, int world) {
  const auto& mesh = options.settings().mesh;
  const auto inner = std::int64_t{mesh.tensor} * mesh.sequence;
  if (world % inner != 0)
    throw ConfigError(base::join(
        "[Options] ", world, world == 1 ? " rank is" : " ranks are", " no multiple of tensor_parallel.autotp_size ",
        mesh.tensor, " x sequence_parallel_size ", mesh.sequence, ". Hint: start ", (world / inner + 1) * inner,
        " ranks, or choose degrees whose product divides ", world, "."));
  return {static_cast<int>(world / inner), mesh.sequence, mesh.tensor};
}

void require_expert_ranks(const Options& options, int world) {
  const auto& experts = options.settings().model.experts;
  const int ranks = world / options.settings().mesh.tensor;
  if (experts.num_experts == 0 || ranks % experts.ep_size == 0) return;
  throw ConfigError(base::join("[libzero.model.experts.ep_size] got ", experts.ep_size, ", expected a divisor of ",
                               ranks, ranks == 1 ? " rank" : " ranks", " and of ", experts.num_experts,
                               " experts. Hint: choose another --ep-world-size, or another number of ranks."));
}

namespace {

// Where a key was set, for messages.
std::string set_by(const Document& document, const char* path) {
  const Entry* entry = document.find(path);
  return entry && !entry->automatic ? " (" + base::printable(entry->source, base::Lines::Escape) + ")" : std::string();
}

void check_data_ranks(const Options& options, int world) {
  const Settings& s = options.settings();
  const std::int64_t w = mesh_shape(options, world).data;
  if (s.data_parallel_size && *s.data_parallel_size != w)
    throw ConfigError(base::join("[Options] /data_parallel_size", set_by(options.document(), "data_parallel_size"),
                                 ": got ", *s.data_parallel_size, ", expected ", w, " (", world,
                                 " ranks / (tensor_parallel.autotp_size ", s.mesh.tensor, " x sequence_parallel_size ",
                                 s.mesh.sequence, ")). Hint: leave it out."));
}

void require_batch_size(const Options& options) {
  if (options.settings().train_batch_size || options.settings().micro_batch_size) return;
  throw ConfigError(
      "[Options] batch sizes: got neither train_batch_size nor train_micro_batch_size_per_gpu, expected one of them. "
      "Hint: add \"train_micro_batch_size_per_gpu\": 1 to " +
      base::printable(options.document().source->name, base::Lines::Escape) + ".");
}

// "start 2 or 4 ranks": the nearest numbers of ranks that the configuration allows, below and above; empty: none.
std::string other_ranks(const Options& options, std::int64_t data_ranks) {
  const base::WorldRule rule = world_rule(options);
  const std::int64_t ranks = data_ranks * rule.copy;
  std::vector<std::int64_t> nearest;
  for (std::int64_t fewer = ranks - 1; fewer > 0 && nearest.empty(); --fewer)
    if (rule.allows(fewer)) nearest.push_back(fewer);
  const std::int64_t most = std::max(rule.batch_parts, rule.data_parallel) * rule.copy;
  const std::size_t below = nearest.size();
  for (std::int64_t more = ranks + 1; more <= std::min(most, 8 * ranks) && nearest.size() == below; ++more)
    if (rule.allows(more)) nearest.push_back(more);
  if (nearest.empty()) return "";
  return base::join("start ", base::one_of(nearest), nearest.back() == 1 ? " rank" : " ranks");
}

// w: data-parallel ranks.
BatchSizes batch_of(const Options& options, std::int64_t w) {
  const Settings& s = options.settings();
  const auto describe = [&](const char* path) { return set_by(options.document(), path); };
  const auto fail = [&](const std::string& message, const std::string& hint) {
    throw ConfigError("[Options] /train_batch_size" + describe("train_batch_size") + ": " + message +
                      ". Hint: " + hint);
  };
  require_batch_size(options);
  const char* const ranks = ranks_name(s);
  const auto T = s.train_batch_size, M = s.micro_batch_size, A = s.accumulation_steps;
  const auto or_ranks = [&] {
    const std::string other = other_ranks(options, w);
    return other.empty() ? other : ", or " + other;
  };
  const auto equation = [&](std::int64_t m, std::int64_t a) {
    return base::join(m, " (micro", describe("train_micro_batch_size_per_gpu"), ") x ", a, " (accumulation",
                      describe("gradient_accumulation_steps"), ") x ", w, " (ranks)");
  };
  if (!T) return {*M * A.value_or(1) * w, *M, A.value_or(1)};
  if (M && A) {
    if (*M * *A * w != *T)
      fail(base::join(*T, " is not ", equation(*M, *A), " = ", *M * *A * w),
           base::join("set it to ", *M * *A * w, ", leave one of the three out", or_ranks(), "."));
    return {*T, *M, *A};
  }
  const std::int64_t known = (M ? *M : A ? *A : 1) * w;
  if (*T % known != 0)
    fail(base::join(*T, " cannot be divided by ", known, " = ",
                    M ? base::join(*M, " (micro)") : base::join(A.value_or(1), " (accumulation)"), " x ", w, " (",
                    ranks, ")"),
         base::join("set it to ", std::max<std::int64_t>(1, *T / known) * known, " or ", (*T / known + 1) * known,
                    or_ranks(), "."));
  const std::int64_t other = *T / known;
  return M ? BatchSizes{*T, *M, other} : BatchSizes{*T, other, A.value_or(1)};
}

}  // namespace

base::WorldRule world_rule(const Options& options) {
  const Settings& s = options.settings();
  base::WorldRule rule;
  rule.tensor = s.mesh.tensor;
  rule.copy = static_cast<std::int64_t>(s.mesh.tensor) * s.mesh.sequence;
  if (s.model.experts.num_experts > 0) rule.experts = s.model.experts.ep_size;
  rule.data_parallel = s.data_parallel_size.value_or(0);
  if (!s.train_batch_size) return rule;
  // Each data-parallel rank takes one part, or several one after another.
  rule.batch_parts = *s.train_batch_size / (s.micro_batch_size.value_or(1) * s.accumulation_steps.value_or(1));
  if (s.micro_batch_size && s.accumulation_steps) rule.data_parallel = rule.batch_parts;
  return rule;
}

BatchSizes resolve_batch(const Options& options, int world) {
  check_data_ranks(options, world);
  return batch_of(options, mesh_shape(options, world).data);
}

namespace {

// What cannot be with `world` ranks; without a number of them, missing batch sizes.
std::vector<ConfigFault> faults_of_ranks(const Options& options, std::optional<int> world) {
  const auto& document = options.document();
  Faults faults;
  // Reports what `check` throws, "... before fact. Hint: remedy.", and returns whether it passed.
  const auto passes = [&](const char* id, const char* key, std::string_view before, const auto& check) {
    try {
      check();
      return true;
    } catch (const ConfigError& e) {
      const std::string text = e.what();
      const auto begin = text.find(before) + before.size();
      const auto hint = text.find(". Hint: ", begin);
      faults.error(id, document.place(key), pointer_of(key), text.substr(begin, hint - begin),
                   hint == std::string::npos ? "" : text.substr(hint + 8));
      return false;
    }
  };
  const bool tensor = options.settings().mesh.tensor > 1;
  const bool sized = passes("missing", "train_batch_size", ": ", [&] { require_batch_size(options); });
  if (!world || !passes("conflict", tensor ? "tensor_parallel.autotp_size" : "sequence_parallel_size", "[Options] ",
                        [&] { (void)mesh_shape(options, *world); }))
    return faults.sorted();
  passes("conflict", "libzero.model.experts.ep_size", "] ", [&] { require_expert_ranks(options, *world); });
  passes("conflict", "data_parallel_size", ": ", [&] { check_data_ranks(options, *world); });
  if (sized)
    passes("conflict", "train_batch_size", ": ", [&] { (void)batch_of(options, mesh_shape(options, *world).data); });
  return faults.sorted();
}

}  // namespace

void require_built(const Options& options) {
  const auto& not_built = options.document().not_built;
  if (!not_built.empty())
    throw ConfigError("[Options] the configuration requires features that this version does not have:\n" +
                      faults_text(not_built, options.document().source->name));
}

}  // namespace config

Options::Options() : Options(from_json("{}", "<defaults>")) {}

Options Options::from_file(const std::filesystem::path& json, const std::vector<Setting>& settings) {
  auto source = std::make_shared<config::Source>(
      config::Source{json == "-" ? "<stdin>" : json.string(), config::read_text(json)});
  return Options(config::document_or_throw(std::move(source), settings));
}

Options Options::from_json(std::string_view text, std::string_view name, const std::vector<Setting>& settings) {
  return Options(config::document_or_throw(
      std::make_shared<config::Source>(config::Source{std::string(name), std::string(text)}), settings));
}

Options Options::with(const std::vector<Setting>& settings) const {
  auto all = document_->overrides;
  all.insert(all.end(), settings.begin(), settings.end());
  return Options(config::document_or_throw(document_->source, std::move(all)));
}

std::vector<std::string> Options::notices() const {
  std::vector<std::string> lines;
  for (const auto& fault : document_->notices)
    lines.push_back(base::printable(fault.file + ":" + std::to_string(fault.line) + ":" + std::to_string(fault.column) +
                                        ": " + fault.pointer + ": " + fault.message +
                                        (fault.hint.empty() ? "" : "; " + fault.hint),
                                    base::Lines::Escape));
  return lines;
}

std::map<std::string, std::string> Options::effective() const {
  std::map<std::string, std::string> values;
  for (const config::Key& key : config::keys()) {
    if (key.path == "comet.api_key") continue;  // a secret
    values.emplace(key.path, document_->effective(key));
  }
  return values;
}

bool Options::is_set(std::string_view key) const { return document_->is_set(std::string(key)); }

std::string Options::digest() const {
  std::string all;
  for (const auto& [path, value] : effective()) all += path + "=" + value + "\n";
  const auto hash = XXH3_128bits(all.data(), all.size());
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  return base::hex(canonical.digest, sizeof canonical.digest);
}

const config::Settings& Options::settings() const { return document_->settings; }

std::vector<ConfigFault> check_config(const std::filesystem::path& file, const std::vector<Setting>& settings,
                                      std::optional<int> world) {
  auto source = std::make_shared<config::Source>(
      config::Source{file == "-" ? "<stdin>" : file.string(), config::read_text(file)});
  config::Faults faults;
  const auto document = config::read_document(source, settings, faults);
  auto all = faults.sorted();
  all.insert(all.end(), document->not_built.begin(), document->not_built.end());
  if (!faults.has_errors()) {
    const auto late = config::faults_of_ranks(Options::from_json(source->text, source->name, settings), world);
    all.insert(all.end(), late.begin(), late.end());
  }
  return all;
}

}  // namespace zero
