// Trains rows in RocksDB as a parameter server would: each batch gets its rows, changes all of them, and puts them back.
//
// Usage: rocksdb_rows FOLDER ROWS BYTES BATCHES.bin SECONDS CACHE_MB
// BATCHES.bin has, for each batch, a count and so many row numbers, all int64. Prints rows a second and CPU us a row.
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/table.h>
#include <time.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>
using namespace rocksdb;
using Clock = std::chrono::steady_clock;

static double cpu() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
static double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }
static Slice key_of(const uint64_t& row) { return Slice(reinterpret_cast<const char*>(&row), 8); }

int main(int, char** v) {
  const uint64_t rows = strtoull(v[2], nullptr, 10);
  const size_t bytes = strtoull(v[3], nullptr, 10);
  Options options;
  options.create_if_missing = true;
  options.IncreaseParallelism(2);
  options.compression = kNoCompression;
  options.use_direct_reads = options.use_direct_io_for_flush_and_compaction = true;
  BlockBasedTableOptions table;
  table.block_cache = NewLRUCache(size_t(atol(v[6])) << 20);
  table.filter_policy.reset(NewBloomFilterPolicy(10));
  options.table_factory.reset(NewBlockBasedTableFactory(table));
  DB* db;
  if (!DB::Open(options, v[1], &db).ok()) return 1;
  WriteOptions write;
  write.disableWAL = true;
  std::string value(bytes, 'x');
  auto begin = Clock::now();
  for (uint64_t row = 0; row < rows;) {
    WriteBatch batch;
    for (int i = 0; i < 1000 && row < rows; i++, row++) batch.Put(key_of(row), value);
    db->Write(write, &batch);
  }
  db->Flush(FlushOptions());
  db->CompactRange(CompactRangeOptions(), nullptr, nullptr);
  printf("filled %.1f s\n", since(begin));
  std::ifstream file(v[4], std::ios::binary);
  begin = Clock::now();
  const double used = cpu(), seconds = atof(v[5]);
  uint64_t trained = 0;
  int64_t count;
  while (since(begin) < seconds && file.read(reinterpret_cast<char*>(&count), 8)) {
    std::vector<uint64_t> ids(count);
    file.read(reinterpret_cast<char*>(ids.data()), 8 * count);
    std::vector<Slice> keys;
    for (auto& id : ids) keys.push_back(key_of(id));
    std::vector<PinnableSlice> values(count);
    std::vector<Status> statuses(count);
    ReadOptions read;
    read.async_io = true;
    db->MultiGet(read, db->DefaultColumnFamily(), count, keys.data(), values.data(), statuses.data());
    WriteBatch batch;
    for (int64_t i = 0; i < count; i++) {
      std::string row = values[i].ToString();
      float* weights = reinterpret_cast<float*>(&row[0]);
      for (size_t k = 0; k < bytes / 4; k++) weights[k] += 1e-3f;
      batch.Put(keys[i], row);
    }
    db->Write(write, &batch);
    trained += count;
  }
  printf("trained %.0f rows/s, %.1f us of CPU a row\n", trained / since(begin), (cpu() - used) / trained * 1e6);
  delete db;
}
