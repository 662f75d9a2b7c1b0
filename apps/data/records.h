// Training data as records: JSONL, CSV, SQuAD's JSON and plain text, in any number of files. Files are mapped and
// indexed, so a record is read when it is asked for. Independent of libzero, torch and models.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/data/mapped_file.h"

namespace data {

struct Answer {
  std::string text;
  std::int64_t begin = -1;  // the byte of the record's "context" at which it stands; -1: not told
};

struct Record {
  // Texts, and numbers and booleans as they are written, by name.
  std::vector<std::pair<std::string, std::string>> fields;
  std::vector<Answer> answers;
  bool impossible = false;  // SQuAD 2: the context has no answer
  std::string where;        // "FILE:LINE", for messages

  // Null if the record has no such field.
  const std::string* find(std::string_view name) const;
};

enum class RecordFormat {
  ByEnding,  // .jsonl and .ndjson, .csv, .json (SQuAD), anything else: lines
  Jsonl,     // an object a line; empty lines are skipped
  Csv,       // RFC 4180: the first record names the fields
  Squad,     // SQuAD 1.1 and 2.0: fields id, title, context, question, and answers
  Lines,     // plain text: every line that is not empty is a record with the field "text"
  Document,  // plain text: every file is one record with the field "text"
};

// Throws std::invalid_argument for another name: auto, jsonl, csv, squad, lines, document.
RecordFormat record_format(std::string_view name);

struct RecordOptions {
  RecordFormat format = RecordFormat::ByEnding;
  // Fields that every record must have. "answers": answers, or impossible. JSONL has them as SQuAD's list of objects,
  // as
  // {"text": [...], "answer_start": [...]}, as a list of texts or as one text; CSV as one text.
  std::vector<std::string> required = {};
};

class Records {
 public:
  // Reads every record once. Throws std::runtime_error with all faults of all files, each with file and line (the first
  // 20 in words, the others counted): no UTF-8, no JSON, missing fields, answers that do not stand where they should.
  Records(const std::vector<std::string>& files, const RecordOptions& options);
  ~Records();
  Records(const Records&) = delete;
  Records& operator=(const Records&) = delete;

  std::int64_t size() const { return static_cast<std::int64_t>(index_.size()); }
  // 0 to size() - 1, in the order of the files. Throws std::out_of_range.
  Record at(std::int64_t number) const;
  std::int64_t bytes() const;
  // Of the files' contents, the format and nothing else; names do not matter.
  std::uint64_t digest() const { return digest_; }

 private:
  struct Source;
  struct Entry {
    std::uint32_t source;
    std::uint32_t line;
    std::uint64_t begin, end;  // bytes of the file; SQuAD: numbers of the source's questions
  };
  Record read(const Source& source, const Entry& entry) const;

  std::vector<std::unique_ptr<Source>> sources_;
  std::vector<Entry> index_;
  std::uint64_t digest_ = 0;
};

}  // namespace data
