// See records.h. Each format has a function that finds the records of a file and one that reads a record; the first one
// calls the second for every record, so what is wrong is found when the files are opened.
#include "apps/data/records.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>

#include "apps/data/csv.h"
#include "apps/data/faults.h"
#include "apps/data/json.h"
#include "apps/data/tokenizers/unicode.h"

namespace data {
namespace {

constexpr std::size_t kRecordBytes = std::size_t{64} << 20;
constexpr std::size_t kSquadBytes = std::size_t{4} << 30;
constexpr std::size_t kMostRecords = std::size_t{1} << 31;

// A record that is not as it should be.
struct RecordFault {
  std::string got, expected;
};

std::string quoted(std::string_view text) {
  std::string shown = "\"";
  for (const char c : text.substr(0, 60)) shown += static_cast<unsigned char>(c) < 32 || c == 127 ? '?' : c;
  while (invalid_utf8(shown) < shown.size()) shown.resize(invalid_utf8(shown));
  return shown + (text.size() > 60 ? "...\"" : "\"");
}

// The byte at which character `number` begins; no value beyond the end.
std::optional<std::size_t> byte_of_character(std::string_view text, std::int64_t number) {
  std::size_t at = 0;
  for (; number > 0 && at < text.size(); --number) at += first_code_point(text.substr(at)).bytes;
  return number == 0 ? std::optional(at) : std::nullopt;
}

// An answer whose place is not told stands where its text is first found.
Answer answer_in(const std::string* context, const std::string& text, const Json* start) {
  if (text.empty()) throw RecordFault{"an answer without text", "a text"};
  if (start == nullptr || context == nullptr) {
    const auto found = context == nullptr ? std::string::npos : context->find(text);
    return {text, found == std::string::npos ? -1 : static_cast<std::int64_t>(found)};
  }
  if (!start->is(Json::Kind::Integer))
    throw RecordFault{std::string("an answer that starts at ") + start->kind_name(), "a number of characters"};
  const auto at = start->integer < 0 ? std::nullopt : byte_of_character(*context, start->integer);
  if (!at || std::string_view(*context).substr(*at, text.size()) != text)
    throw RecordFault{"the answer " + quoted(text) + " with start " + std::to_string(start->integer),
                      "the character of the context at which it stands"};
  return {text, static_cast<std::int64_t>(*at)};
}

const std::string& text_of(const Json* value, const char* what) {
  if (value == nullptr) throw RecordFault{std::string("no ") + what, "a text"};
  if (!value->is(Json::Kind::Text)) throw RecordFault{std::string(value->kind_name()) + " as " + what, "a text"};
  return value->text;
}

void read_answers(const Json& value, Record& record) {
  const auto* context = record.find("context");
  if (value.is(Json::Kind::Text)) {
    record.answers.push_back(answer_in(context, value.text, nullptr));
  } else if (value.is(Json::Kind::Object)) {
    const auto *texts = value.find("text"), *starts = value.find("answer_start");
    if (texts == nullptr || !texts->is(Json::Kind::List) ||
        (starts != nullptr && (!starts->is(Json::Kind::List) || starts->items.size() != texts->items.size())))
      throw RecordFault{"answers of another form", "\"text\" and \"answer_start\", lists of the same length"};
    for (std::size_t i = 0; i < texts->items.size(); ++i)
      record.answers.push_back(answer_in(context, text_of(&texts->items[i], "the text of an answer"),
                                         starts == nullptr ? nullptr : &starts->items[i]));
  } else if (value.is(Json::Kind::List)) {
    for (const auto& item : value.items) {
      const bool object = item.is(Json::Kind::Object);
      record.answers.push_back(answer_in(context, text_of(object ? item.find("text") : &item, "the text of an answer"),
                                         object ? item.find("answer_start") : nullptr));
    }
  } else {
    throw RecordFault{std::string(value.kind_name()) + " as answers", "a list, an object with \"text\", or a text"};
  }
}

void check_required(const Record& record, const std::vector<std::string>& required) {
  for (const auto& name : required) {
    if (name == "answers" ? !record.answers.empty() || record.impossible : record.find(name) != nullptr) continue;
    std::string has;
    for (const auto& [field, value] : record.fields) has += (has.empty() ? "" : ", ") + quoted(field);
    throw RecordFault{has.empty() ? "no field" : "the fields " + has.substr(0, 300), "a field " + quoted(name)};
  }
}

bool is_true(const Json* value) { return value != nullptr && value->is(Json::Kind::Bool) && value->boolean; }

Record jsonl_record(std::string_view line) {
  Json json;
  try {
    json = read_json(line, {.depth = 8, .bytes = kRecordBytes});
  } catch (const JsonFault& fault) {
    throw RecordFault{std::string(fault.what()) + " at byte " + std::to_string(fault.offset) + " of the line", "JSON"};
  }
  if (!json.is(Json::Kind::Object)) throw RecordFault{json.kind_name(), "an object a line"};
  Record record;
  for (const auto& [name, value] : json.fields) {
    if (value.is(Json::Kind::Text)) {
      record.fields.emplace_back(name, value.text);
    } else if (value.is(Json::Kind::Bool) || value.is(Json::Kind::Integer) || value.is(Json::Kind::Number)) {
      auto written = line.substr(value.begin, value.end - value.begin);
      written.remove_prefix(std::min(written.find_first_not_of(" \t\r\n:,"), written.size()));
      written = written.substr(0, written.find_first_of(" \t\r\n:,}]"));
      record.fields.emplace_back(name, written);
    }
  }
  record.impossible = is_true(json.find("is_impossible"));
  const auto* answers = json.find("answers");
  if (answers != nullptr && !answers->is(Json::Kind::Null)) {
    read_answers(*answers, record);
    if (record.answers.empty()) record.impossible = true;
  }
  return record;
}

// Where the values of a question of a SQuAD file are.
struct Question {
  struct Extent {
    std::size_t begin = 0, end = 0;
  };
  Extent context, question, id, answers;
  bool impossible = false;
};

Question::Extent extent_of(const Json* value) {
  return value == nullptr ? Question::Extent{} : Question::Extent{value->begin, value->end};
}

Json value_at(std::string_view file, Question::Extent extent) {
  auto text = file.substr(extent.begin, extent.end - extent.begin);
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n:,"), text.size()));
  return read_json(text, {.depth = 8, .bytes = kRecordBytes});
}

void add_question(const Json& paragraph, const Json& qa, std::vector<Question>& questions) {
  if (!qa.is(Json::Kind::Object)) throw RecordFault{std::string(qa.kind_name()) + " as a question", "an object"};
  Record record;
  record.fields.emplace_back("context", text_of(paragraph.find("context"), "the context of a paragraph"));
  (void)text_of(qa.find("question"), "the text of a question");
  if (const auto* id = qa.find("id")) (void)text_of(id, "the id of a question");
  const auto* impossible = qa.find("is_impossible");
  if (impossible != nullptr && !impossible->is(Json::Kind::Bool))
    throw RecordFault{std::string(impossible->kind_name()) + " as \"is_impossible\"", "true or false"};
  const auto* answers = qa.find("answers");
  if (answers == nullptr || !answers->is(Json::Kind::List))
    throw RecordFault{"a question without a list of answers", "\"answers\": [...]"};
  if (!is_true(impossible)) read_answers(*answers, record);
  if (record.answers.empty() && !is_true(impossible))
    throw RecordFault{"a question without an answer", "one, or \"is_impossible\": true"};
  questions.push_back({extent_of(paragraph.find("context")), extent_of(qa.find("question")), extent_of(qa.find("id")),
                       extent_of(answers), is_true(impossible)});
}

constexpr int kParagraphDepth = 5;  // {"data": [{"paragraphs": [{

std::vector<Question> squad_questions(const std::string& path, std::string_view text, Faults& faults) {
  std::vector<Question> questions;
  const auto paragraph = [&](int depth, const Json& object) {
    if (depth != kParagraphDepth) return true;
    std::size_t at = object.begin;
    try {
      const auto* qas = object.find("qas");
      if (qas == nullptr || !qas->is(Json::Kind::List))
        throw RecordFault{"a paragraph without a list of questions", "\"qas\": [...]"};
      for (const auto& qa : qas->items) {
        at = qa.end;
        add_question(object, qa, questions);
      }
    } catch (const RecordFault& fault) {
      faults.add(path + ":" + std::to_string(line_of(text, at)), fault.got, fault.expected);
    }
    return false;
  };
  try {
    const auto root = read_json(text, {.depth = 12, .bytes = kSquadBytes, .text_bytes = kRecordBytes}, paragraph);
    const auto* data = root.find("data");
    if (data == nullptr || !data->is(Json::Kind::List)) throw JsonFault(0, "JSON without a list \"data\"");
    for (const auto& article : data->items)
      if (const auto* list = article.find("paragraphs"); list == nullptr || !list->is(Json::Kind::List))
        throw JsonFault(article.begin, "an article without a list \"paragraphs\"");
  } catch (const JsonFault& fault) {
    faults.add(path + ":" + std::to_string(line_of(text, fault.offset)), fault.what(),
               "the JSON of SQuAD, {\"data\": [{\"paragraphs\": [...]}]}");
  }
  return questions;
}

RecordFormat format_of(const std::string& path, RecordFormat format) {
  if (format != RecordFormat::ByEnding) return format;
  const auto ends = [&](std::string_view ending) { return path.ends_with(ending); };
  if (ends(".jsonl") || ends(".ndjson")) return RecordFormat::Jsonl;
  if (ends(".csv")) return RecordFormat::Csv;
  return ends(".json") ? RecordFormat::Squad : RecordFormat::Lines;
}

}  // namespace

struct Records::Source {
  Source(const std::string& file_path, RecordFormat file_format)
      : path(file_path), file(file_path, "data"), format(file_format) {}
  std::string_view text() const {
    return {reinterpret_cast<const char*>(file.data()), static_cast<std::size_t>(file.size())};
  }

  std::string path;
  MappedFile file;
  RecordFormat format;
  std::vector<std::string> columns;  // CSV
  std::vector<Question> questions;   // SQuAD
};

const std::string* Record::find(std::string_view name) const {
  for (const auto& [field, value] : fields)
    if (field == name) return &value;
  return nullptr;
}

RecordFormat record_format(std::string_view name) {
  static constexpr std::array<std::pair<const char*, RecordFormat>, 6> kNames{{{"auto", RecordFormat::ByEnding},
                                                                               {"jsonl", RecordFormat::Jsonl},
                                                                               {"csv", RecordFormat::Csv},
                                                                               {"squad", RecordFormat::Squad},
                                                                               {"lines", RecordFormat::Lines},
                                                                               {"document", RecordFormat::Document}}};
  for (const auto& [known, format] : kNames)
    if (name == known) return format;
  throw std::invalid_argument("[records] got format " + quoted(name) +
                              ", expected auto, jsonl, csv, squad, lines or document");
}

Records::Records(const std::vector<std::string>& files, const RecordOptions& options) {
  if (files.empty()) throw std::invalid_argument("[records] got no file, expected at least one");
  Faults faults;
  for (const auto& path : files) {
    std::unique_ptr<Source> opened;
    try {
      opened = std::make_unique<Source>(path, format_of(path, options.format));
    } catch (const std::runtime_error& e) {
      faults.add(path, e.what(), "a data file");
      continue;
    }
    auto& source = *sources_.emplace_back(std::move(opened));
    const auto text = source.text();
    const auto number = static_cast<std::uint32_t>(sources_.size() - 1);
    const auto add = [&](std::int64_t line, std::size_t begin, std::size_t end) {
      const Entry entry{number, static_cast<std::uint32_t>(std::min<std::int64_t>(line, UINT32_MAX)), begin, end};
      try {
        if (index_.size() >= kMostRecords) throw RecordFault{"more records", "at most 2^31"};
        if (source.format != RecordFormat::Squad && end - begin > kRecordBytes)
          throw RecordFault{"a record of " + std::to_string(end - begin) + " bytes",
                            "at most " + std::to_string(kRecordBytes) + ". Hint: several files, or a line a document"};
        check_required(read(source, entry), options.required);
        index_.push_back(entry);
      } catch (const RecordFault& fault) {
        faults.add(path + ":" + std::to_string(line), fault.got, fault.expected);
      }
    };
    if (const auto at = invalid_utf8(text); at < text.size()) {
      faults.add(path + ":" + std::to_string(line_of(text, at)), "bytes that are not UTF-8", "UTF-8");
      continue;
    }
    switch (source.format) {
      case RecordFormat::Document:
        add(1, 0, text.size());
        break;
      case RecordFormat::Csv: {
        const auto fault = each_csv_record(text, [&](std::int64_t line, std::size_t begin, std::size_t end) {
          if (source.columns.empty())
            source.columns = csv_fields(text.substr(begin, end - begin));
          else
            add(line, begin, end);
        });
        if (fault) faults.add(path + ":" + std::to_string(fault->line), fault->got, fault->expected);
        break;
      }
      case RecordFormat::Squad: {
        source.questions = squad_questions(path, text, faults);
        std::size_t counted = 0;
        std::int64_t line = 1;
        for (std::size_t i = 0; i < source.questions.size(); ++i) {
          const auto to = std::max(counted, source.questions[i].question.end);
          line += line_of(text.substr(counted, to - counted), to - counted) - 1;
          counted = to;
          add(line, i, i + 1);
        }
        break;
      }
      default: {
        std::int64_t line = 1;
        for (std::size_t begin = 0; begin < text.size(); ++line) {
          const auto end = std::min(text.find('\n', begin), text.size());
          if (text.substr(begin, end - begin).find_first_not_of(" \t\r") != std::string_view::npos)
            add(line, begin, end);
          begin = end + 1;
        }
      }
    }
    const std::array<std::uint64_t, 3> state{digest_, XXH3_64bits(text.data(), text.size()),
                                             static_cast<std::uint64_t>(source.format)};
    digest_ = XXH3_64bits(state.data(), sizeof state);
  }
  faults.raise_any();
  if (index_.empty()) fail_file("records", files[0], "no record", "at least one");
}

Records::~Records() = default;

Record Records::at(std::int64_t number) const {
  if (number < 0 || number >= size())
    throw std::out_of_range("[Records::at] got " + std::to_string(number) + ", expected less than " +
                            std::to_string(size()));
  const auto& entry = index_[static_cast<std::size_t>(number)];
  const auto& source = *sources_[entry.source];
  auto record = read(source, entry);
  record.where = source.path + ":" + std::to_string(entry.line);
  return record;
}

std::int64_t Records::bytes() const {
  std::int64_t sum = 0;
  for (const auto& source : sources_) sum += source->file.size();
  return sum;
}

Record Records::read(const Source& source, const Entry& entry) const {
  const auto file = source.text();
  Record record;
  if (source.format == RecordFormat::Squad) {
    const auto& question = source.questions[entry.begin];
    record.fields.emplace_back("context", value_at(file, question.context).text);
    record.fields.emplace_back("question", value_at(file, question.question).text);
    if (question.id.end > 0) record.fields.emplace_back("id", value_at(file, question.id).text);
    record.impossible = question.impossible;
    if (!record.impossible) read_answers(value_at(file, question.answers), record);
    return record;
  }
  auto text = file.substr(entry.begin, entry.end - entry.begin);
  if (source.format == RecordFormat::Jsonl) return jsonl_record(text);
  if (source.format == RecordFormat::Csv) {
    auto values = csv_fields(text);
    if (values.size() != source.columns.size())
      throw RecordFault{std::to_string(values.size()) + " fields",
                        std::to_string(source.columns.size()) + " as in the first record"};
    for (std::size_t i = 0; i < values.size(); ++i) record.fields.emplace_back(source.columns[i], std::move(values[i]));
    if (const auto* answer = record.find("answers")) {
      record.impossible = answer->empty();
      if (!answer->empty()) record.answers.push_back(answer_in(record.find("context"), *answer, nullptr));
    }
    return record;
  }
  if (source.format == RecordFormat::Lines && text.ends_with('\r')) text.remove_suffix(1);
  record.fields.emplace_back("text", text);
  return record;
}

}  // namespace data
