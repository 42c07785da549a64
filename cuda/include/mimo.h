/*
 * mimo.h - the one C ABI between the TypeScript program and its native libraries.
 *
 * The same symbols with the same meaning are built twice: libmimo_cpu.so (any x86-64 Linux with AVX2, every test) and
 * libmimo_cuda.so (NVIDIA GPUs). How to use it:
 *
 *     mimo_device* device; mimo_stream* stream; void* x;
 *     if (mimo_abi_version() != MIMO_ABI_VERSION) ...            // refuse another library
 *     mimo_device_open(0, 2, &device);                           // device index, CPU threads
 *     mimo_stream_create(device, 0, &stream);
 *     mimo_memory_allocate(stream, bytes, MIMO_TAG_ACTIVATION, &x);
 *     mimo_memory_copy_to_device(stream, x, host, bytes);
 *     mimo_rms_norm_forward_args args = {...};
 *     if (mimo_rms_norm_forward(stream, &args)) puts(mimo_last_error());
 *     mimo_stream_synchronize(stream);
 *
 * Rules
 *  - Every function returns a status: MIMO_OK or a MIMO_ERROR_*; mimo_last_error() then holds one sentence (per thread).
 *    C++ exceptions never cross, nothing calls back.
 *  - Every operation is `int32_t mimo_NAME(mimo_stream*, const mimo_NAME_args*)`: it is queued on the stream, reads the
 *    argument struct before it returns, and takes its temporary memory from the stream's pool. On the CPU library it is
 *    done when it returns.
 *  - Pointers inside argument structs are device memory unless the name starts with `host_`. A null pointer is legal
 *    only where the comment says "or null".
 *  - Matrices are row major. "stride" counts elements between consecutive rows; 0 is never a legal stride.
 *  - dtype fields hold MIMO_DTYPE_*. Arithmetic is fp32 (sums that need it in fp64), whatever the storage type.
 *  - `row_count` (device int32, or null) says how many rows are live, at most the shape's: a GPU need not ask the host
 *    how many tokens an expert has. Rows beyond it are neither read nor written.
 *  - `cu_seqlens` is device int32 [sequences + 1], cumulative token counts of packed sequences, first 0, last = tokens.
 *  - Gradients named d..._accumulate and all `float* d<weight>` are added to what is there (fp32 main gradients), unless
 *    the operation has a field that says otherwise.
 *  - Step-wide scalars (learning rate, clip factor, 1/tokens, found-inf) are read from device memory.
 *  - This header is the one definition of the ABI: src/native/abi.ts and common/operations.def are written from it
 *    (tables.ts, "bun build.ts tables"). It therefore keeps to plain C: every enum value is written out, every argument named.
 *  - No floating-point atomics: results do not depend on scheduling (but see mimo_device_set_deterministic).
 *
 * Letters in shapes: T tokens, H heads, P head dimension, G groups, N state dimension, E experts, K top-k, S sequences.
 */
#ifndef MIMO_H
#define MIMO_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with every change of a struct's layout or of a meaning: the program refuses a library of another version. */
#define MIMO_ABI_VERSION 18
/* Texts of fixed length, each with its zero. */
#define MIMO_RUN_PATH_BYTES 64
#define MIMO_HOST_BYTES 64
#define MIMO_MODULE_BYTES 32
#define MIMO_COORDINATES_BYTES 64
#define MIMO_SENTENCE_BYTES 512
/* Numbers behind the factors of rows in e4m3 that kernels may read. */
#define MIMO_E4M3_SPARE_FACTORS 260

#if defined(_WIN32)
#define MIMO_API
#else
#define MIMO_API __attribute__((visibility("default")))
#endif

/* ---- status ------------------------------------------------------------------------------------------------- */

enum mimo_status {
  MIMO_OK = 0,
  MIMO_ERROR_ARGUMENT = 1,      /* an argument is out of range: a bug in the caller */
  MIMO_ERROR_OUT_OF_MEMORY = 2, /* the device or the host has no memory left */
  MIMO_ERROR_UNSUPPORTED = 3,   /* this library or device cannot do it */
  MIMO_ERROR_DEVICE = 4,        /* the driver or a vendor library failed */
  MIMO_ERROR_INTERNAL = 5,      /* a C++ exception that should not have happened */
  MIMO_ERROR_PEER = 6,          /* another rank failed, was absent or disagreed */
  MIMO_ERROR_DATA = 7           /* bytes of a file are damaged or of an unknown kind */
};

enum mimo_dtype { MIMO_DTYPE_F32 = 0, MIMO_DTYPE_BF16 = 1, MIMO_DTYPE_I32 = 2, MIMO_DTYPE_U8 = 3, MIMO_DTYPE_F64 = 4 };

/* Purpose of a block of memory; statistics are kept by tag. */
enum mimo_memory_tag {
  MIMO_TAG_PARAMETER = 0,
  MIMO_TAG_GRADIENT = 1,
  MIMO_TAG_OPTIMIZER = 2,
  MIMO_TAG_ACTIVATION = 3,
  MIMO_TAG_WORKSPACE = 4,
  MIMO_TAG_DATA = 5,
  MIMO_TAG_COMMUNICATION = 6,
  MIMO_TAG_COUNT = 7
};

MIMO_API int32_t mimo_abi_version(void);
/* "cpu" or "cuda". */
MIMO_API const char* mimo_library_kind(void);
/* A line that names the embedded or opened libraries and their versions. */
MIMO_API const char* mimo_library_versions(void);
/* The sentence of the last failed call of this thread; "" when none failed. */
MIMO_API const char* mimo_last_error(void);

/* ---- devices, streams, events ------------------------------------------------------------------------------- */

typedef struct mimo_device mimo_device;
typedef struct mimo_stream mimo_stream;
typedef struct mimo_event mimo_event;

typedef struct mimo_device_info {
  char name[128];          /* processor or GPU, zero terminated */
  char instructions[64];   /* "avx2", "avx512" or "sm_90" */
  int64_t memory_bytes;    /* physical memory of the device */
  int32_t threads;         /* worker threads (CPU) or multiprocessors (GPU) */
  int32_t device_count;    /* devices this library can open */
} mimo_device_info;

/* Devices this process could open; 0 without a GPU, or with too old a driver. Opens nothing. */
MIMO_API int32_t mimo_device_count(int32_t* count);
/* threads: CPU worker threads, 0 = one per core this process may use. Ignored on a GPU. */
MIMO_API int32_t mimo_device_open(int32_t index, int32_t threads, mimo_device** device);
MIMO_API int32_t mimo_device_close(mimo_device* device);
MIMO_API int32_t mimo_device_describe(mimo_device* device, mimo_device_info* info);
/* 1: results repeat bit for bit, whatever it costs. 0 (default): vendor libraries may add in any order; on CUDA that is
 * the gradient of bf16 attention, and NCCL's choice of algorithm. The CPU library always repeats. */
MIMO_API int32_t mimo_device_set_deterministic(mimo_device* device, int32_t deterministic);

/* Vendor libraries offer several algorithms for a product or an attention, and guess which is fastest: that one is taken unless
 * a choice is given. Choices replace earlier ones. Work may be under way, but not work recorded in graphs. A choice is a line: the
 * call it is for, a tab, the algorithm; text behind another tab is ignored. Algorithms add in other orders, so that
 * choices change the last bits of results, but each repeats bit for bit. A choice for another GPU or vendor library is refused
 * with MIMO_ERROR_UNSUPPORTED by the first operation that meets it. The CPU library offers nothing and reads nothing. */
MIMO_API int32_t mimo_device_set_algorithms(mimo_device* device, const char* choices);
/* Times, on memory of its own, the algorithms of all products and attentions that were called since the device was opened and
 * have no choice. The GPU should have nothing else to do. Operations take the timed algorithms only after
 * mimo_device_set_algorithms. left_out: calls for which there was no memory. */
MIMO_API int32_t mimo_device_time_algorithms(mimo_device* device, mimo_stream* stream, int32_t* left_out);
/* The choices that were timed so far, with three fields more: microseconds of the choice, of the vendor's first answer, and the
 * number of algorithms timed. `text` gets the first `capacity` bytes, without a zero; bytes: of the whole. */
MIMO_API int32_t mimo_device_timed_algorithms(mimo_device* device, char* text, int64_t capacity, int64_t* bytes);

/* priority: 0 normal, negative is served first where the device can. */
MIMO_API int32_t mimo_stream_create(mimo_device* device, int32_t priority, mimo_stream** stream);
MIMO_API int32_t mimo_stream_destroy(mimo_stream* stream);
MIMO_API int32_t mimo_stream_synchronize(mimo_stream* stream);

/* How much of a stream's work was launched as CUDA graphs since they were turned on. */
typedef struct mimo_graph_statistics {
  int64_t graphs;               /* recorded */
  int64_t launches;             /* of graphs */
  int64_t operations_in_graphs; /* launched by them */
  int64_t operations_alone;     /* launched one by one */
} mimo_graph_statistics;

/* 1: operations are held back until something needs them queued (an event, a collective, a copy to or from the host, 64 of
 * them), and launched as one CUDA graph where just the same ones, addresses included, came before. An error of an operation
 * may be returned by a later call. mimo_device_set_deterministic comes before it. 0 (default): each is queued at once. Only
 * on CUDA: the CPU library returns MIMO_ERROR_UNSUPPORTED for 1. */
MIMO_API int32_t mimo_stream_set_graphs(mimo_stream* stream, int32_t wanted);
MIMO_API int32_t mimo_stream_graph_statistics(mimo_stream* stream, mimo_graph_statistics* statistics);

MIMO_API int32_t mimo_event_create(mimo_device* device, mimo_event** event);
MIMO_API int32_t mimo_event_destroy(mimo_event* event);
MIMO_API int32_t mimo_event_record(mimo_event* event, mimo_stream* stream);
/* Work queued on `stream` from now on starts after the work that `event` recorded. */
MIMO_API int32_t mimo_stream_wait_event(mimo_stream* stream, mimo_event* event);
MIMO_API int32_t mimo_event_synchronize(mimo_event* event);
/* Milliseconds from `start` to `end`, both recorded and finished. */
MIMO_API int32_t mimo_event_elapsed(mimo_event* start, mimo_event* end, float* milliseconds);

/* ---- memory ------------------------------------------------------------------------------------------------- */

typedef struct mimo_memory_statistics {
  int64_t live_bytes;                  /* handed out and not freed */
  int64_t peak_bytes;                  /* highest live_bytes since the last reset */
  int64_t reserved_bytes;              /* taken from the system, live or cached */
  int64_t live_blocks;
  int64_t system_allocations;          /* calls to the system allocator so far */
  int64_t live_bytes_by_tag[MIMO_TAG_COUNT];
  int64_t peak_bytes_by_tag[MIMO_TAG_COUNT];
} mimo_memory_statistics;

/* Stream-ordered: the block may be used by work queued on `stream` from now on. 64-byte aligned at least; zero bytes
 * give a unique address. The block belongs to the pool of the stream's device. */
MIMO_API int32_t mimo_memory_allocate(mimo_stream* stream, int64_t bytes, int32_t tag, void** address);
/* The block may be reused by work queued on `stream` from now on. */
MIMO_API int32_t mimo_memory_free(mimo_stream* stream, void* address);
MIMO_API int32_t mimo_memory_statistics_get(mimo_device* device, mimo_memory_statistics* statistics);
MIMO_API int32_t mimo_memory_reset_peak(mimo_device* device);
/* Gives cached blocks back to the system. */
MIMO_API int32_t mimo_memory_trim(mimo_device* device);
/* Refuse to hold more than `bytes` live (0 = no limit): tests and plans of a smaller device. */
MIMO_API int32_t mimo_memory_limit(mimo_device* device, int64_t bytes);

/* Copies to the host are complete when they return; the source of one to the device may change then. */
MIMO_API int32_t mimo_memory_copy_to_device(mimo_stream* stream, void* destination, const void* source, int64_t bytes);
MIMO_API int32_t mimo_memory_copy_to_host(mimo_stream* stream, void* destination, const void* source, int64_t bytes);
MIMO_API int32_t mimo_memory_copy(mimo_stream* stream, void* destination, const void* source, int64_t bytes);
MIMO_API int32_t mimo_memory_set_zero(mimo_stream* stream, void* destination, int64_t bytes);

/* ---- runs: memory that the ranks of one host share ----------------------------------------------------------- */

/* An unnamed file in /dev/shm holds a run: the ranks' names, whether they live, which call each waits for, and the memory of
 * groups. The file disappears with the last process that has it open, however that process ends. */
typedef struct mimo_run mimo_run;

enum mimo_rank_phase {
  MIMO_RANK_PHASE_ABSENT = 0, /* has not joined */
  MIMO_RANK_PHASE_RUNNING = 1,
  MIMO_RANK_PHASE_FINISHED = 2,
  MIMO_RANK_PHASE_FAILED = 3
};

enum mimo_collective {
  MIMO_COLLECTIVE_ALL_REDUCE = 0,
  MIMO_COLLECTIVE_REDUCE_SCATTER = 1,
  MIMO_COLLECTIVE_ALL_GATHER = 2,
  MIMO_COLLECTIVE_BROADCAST = 3,
  MIMO_COLLECTIVE_ALL_TO_ALL = 4,
  MIMO_COLLECTIVE_SEND = 5,
  MIMO_COLLECTIVE_RECEIVE = 6,
  MIMO_COLLECTIVE_BARRIER = 7,
  MIMO_COLLECTIVE_EXCHANGE = 8,
  MIMO_COLLECTIVE_EXCHANGE_ROWS = 9
};

enum mimo_call_state { MIMO_CALL_STATE_STARTED = 0, MIMO_CALL_STATE_FINISHED = 1, MIMO_CALL_STATE_FAILED = 2 };

/* State of a rank. Strings are zero terminated; times are nanoseconds of the host's monotonic clock. */
typedef struct mimo_rank_state {
  char host[MIMO_HOST_BYTES];
  char module[MIMO_MODULE_BYTES];           /* such as "language" */
  char coordinates[MIMO_COORDINATES_BYTES]; /* such as "tp 0 dp 1" */
  char error[MIMO_SENTENCE_BYTES];          /* the sentence it failed with, or "" */
  int64_t phase;        /* MIMO_RANK_PHASE_* */
  int64_t pid;
  int64_t heartbeat;     /* beats so far */
  int64_t progress;      /* finished collectives and steps */
  int64_t progress_time; /* when it last rose */
  int64_t step;          /* last finished step */
  int64_t calls;         /* collectives started so far */
  int64_t waiting_call;  /* the call its training thread waits for, or -1 */
} mimo_rank_state;

/* A collective call of a rank: an entry of the flight recorder. */
typedef struct mimo_call_record {
  char group[64];
  int64_t call;     /* counts this rank's calls */
  int64_t sequence; /* counts the group's collectives; for send and receive, the messages of this pair and direction */
  int64_t kind;     /* MIMO_COLLECTIVE_* */
  int64_t bytes;    /* moved by or given to this rank */
  int64_t state;    /* MIMO_CALL_STATE_* */
  int64_t started;
  int64_t finished;      /* or 0 */
  int64_t missing_count; /* members whose part was missing when it failed */
  int64_t missing[16];   /* the first of them: global ranks */
} mimo_call_record;

/* Makes the shared memory of a run. `path` [MIMO_RUN_PATH_BYTES] receives where the other processes of this host open it
 * while this one lives. `timeout_ms`: a living rank without progress for longer has failed. `supervised` 1: a launcher, which
 * is this process, calls mimo_run_watch, and the ranks watch each other only when it has not for 5 s; 0: they always do. */
MIMO_API int32_t mimo_run_create(int32_t ranks, int32_t supervised, int64_t timeout_ms, char* path, mimo_run** run);
MIMO_API int32_t mimo_run_open(const char* path, mimo_run** run);
MIMO_API int32_t mimo_run_close(mimo_run* run);
/* This process is `rank` from now on: a thread of its own, its heart, beats until the process ends or mimo_run_leave. When
 * the run has failed and this process does not end by itself within 3 s, its heart concludes (mimo_run_conclude) and ends it
 * with `exit_code`. */
MIMO_API int32_t mimo_run_join(mimo_run* run, int32_t rank, int32_t exit_code);
/* Sets a rank's names in diagnoses. */
MIMO_API int32_t mimo_run_describe(mimo_run* run, int32_t rank, const char* module, const char* coordinates);
/* A step is done. */
MIMO_API int32_t mimo_run_progress(mimo_run* run, int64_t step);
/* This rank has done all its work. */
MIMO_API int32_t mimo_run_leave(mimo_run* run);
/* Ends the run: every wait of every rank returns MIMO_ERROR_PEER. The first failure counts, later ones are only kept as
 * their rank's own error. `rank` -1: no rank is to blame. */
MIMO_API int32_t mimo_run_fail(mimo_run* run, int32_t rank, const char* sentence);
/* The launcher tells which process will be `rank`, so that mimo_run_watch can see it stop before it joins. */
MIMO_API int32_t mimo_run_expect(mimo_run* run, int32_t rank, int32_t pid);
/* Looks at every rank, but from a rank's own process, whose heart does; to be called a few times a second. A rank that died, stopped or makes no progress fails the run.
 * `failed`: 1 when the run has failed; its rank is then in `rank` and its sentence in `reason` [MIMO_SENTENCE_BYTES]. */
MIMO_API int32_t mimo_run_watch(mimo_run* run, int32_t* failed, int32_t* rank, char* reason);
/* 1 for a single caller, which prints the diagnosis. */
MIMO_API int32_t mimo_run_claim_diagnosis(mimo_run* run, int32_t* claimed);
/* Why the run has failed: a sentence of its own, and a line for every other rank, as much as `capacity` bytes hold. */
MIMO_API int32_t mimo_run_diagnose(mimo_run* run, char* text, int64_t capacity);
/* The descriptor that this process prints a diagnosis to, in place of standard error. */
MIMO_API int32_t mimo_run_print_to(mimo_run* run, int32_t file);
/* The run has failed, and this rank, joined or not, will end with `exit_code`. Returns when the diagnosis has been printed, to standard
 * error (or where mimo_run_print_to says) by this process where neither a living launcher nor another rank does, or after some seconds. A rank of this host that
 * is to blame and does not live on is killed then. */
MIMO_API int32_t mimo_run_conclude(mimo_run* run, int32_t exit_code);
/* From now on the heart of this process's rank writes the rank's state and a failure to `path`, at every beat: a
 * recording that is left when every process of the run is killed. mimo_run_leave removes the file. */
MIMO_API int32_t mimo_run_record(mimo_run* run, const char* path);
/* Writes such a file of any rank, once: called by the launcher when the run has failed. */
MIMO_API int32_t mimo_run_record_rank(mimo_run* run, int32_t rank, const char* path);
/* A run made from `count` such files, whose paths lie one after the other, each with its zero: it can be asked for
 * states and calls (`ranks`: how many there were), and has failed with the recorded failure, or with the rank that fell
 * silent first. */
MIMO_API int32_t mimo_run_read_recordings(const char* paths, int32_t count, int32_t* ranks, mimo_run** run);
MIMO_API int32_t mimo_run_rank_state(mimo_run* run, int32_t rank, mimo_rank_state* state);
/* The latest calls of a rank, newest first, at most `capacity` of those still recorded. */
MIMO_API int32_t mimo_run_calls(mimo_run* run, int32_t rank, mimo_call_record* records, int32_t capacity,
                                int32_t* count);
/* The system ends this process when process `parent`, which must have started it, ends; where it has already, this process
 * ends with `exit_code`. */
MIMO_API int32_t mimo_end_with_parent(int32_t parent, int32_t exit_code);

/* ---- groups and collectives ---------------------------------------------------------------------------------- */

/* Members call the same operations of a group in the same order; send and receive are matched by pair and direction.
 * A call starts after the stream's earlier work, goes on by itself, and has a ticket; work queued after
 * mimo_group_wait sees its result. Tensors stay as they are until then. Reductions (f32, bf16, f64, i32) add in the order
 * of the members, bf16 with fp32 sums, so that results repeat bit for bit; on CUDA in NCCL's order, which
 * mimo_device_set_deterministic fixes. Every member may have several calls under way, of
 * several groups in any order. */
typedef struct mimo_group mimo_group;

enum mimo_reduction { MIMO_REDUCTION_SUM = 0, MIMO_REDUCTION_MAX = 1 };

/* host_ranks: global ranks of the members, in the group's order, this process among them. A rank makes each group once. */
MIMO_API int32_t mimo_group_create(mimo_run* run, const char* name, const int32_t* host_ranks, int32_t size,
                                   mimo_group** group);
MIMO_API int32_t mimo_group_destroy(mimo_group* group);
MIMO_API int32_t mimo_group_wait(mimo_group* group, mimo_stream* stream, int64_t ticket);
/* x = reduction of every member's x. A NaN is the maximum of everything; on CUDA it is dropped where there is a number. */
MIMO_API int32_t mimo_group_all_reduce(mimo_group* group, mimo_stream* stream, void* x, int64_t elements, int32_t dtype,
                                       int32_t reduction, int64_t* ticket);
/* y [elements] = this member's part of the sum of every member's x [size, elements]. y may be that part of x. */
MIMO_API int32_t mimo_group_reduce_scatter(mimo_group* group, mimo_stream* stream, const void* x, void* y,
                                           int64_t elements, int32_t dtype, int64_t* ticket);
/* y [size, bytes] = every member's x [bytes]. x may be this member's part of y. */
MIMO_API int32_t mimo_group_all_gather(mimo_group* group, mimo_stream* stream, const void* x, void* y, int64_t bytes,
                                       int64_t* ticket);
MIMO_API int32_t mimo_group_broadcast(mimo_group* group, mimo_stream* stream, void* x, int64_t bytes, int32_t root,
                                      int64_t* ticket);
/* Rows [offset, offset + count) of x go to each member, and come from each into y. host_rows [4, size]: send offsets, send
 * counts, receive offsets, receive counts, in rows. */
MIMO_API int32_t mimo_group_all_to_all(mimo_group* group, mimo_stream* stream, const void* x, void* y,
                                       const int32_t* host_rows, int64_t row_bytes, int64_t* ticket);
/* Rows whose places the device knows: those that mimo_expert_exchange_plan finds. Ranges [size, ranges, 3] say for each member, of
 * every run of rows, its first row here, its first row at the member, and how many rows; the receive_ranges of a member B say of
 * a member A the same as A's send_ranges say of B. Ranges of y do not overlap. */
typedef struct mimo_row_exchange {
  const void* x; /* rows of row_bytes */
  void* y;
  const void* beside_x; /* rows of beside_row_bytes that go the same way in the same message, or null */
  void* beside_y;
  const int32_t* send_ranges;
  const int32_t* receive_ranges;
  int64_t ranges;
  int64_t row_bytes;
  int64_t beside_row_bytes;
  int64_t x_rows; /* upper bounds of the rows of x and y */
  int64_t y_rows;
  int64_t stage_rows; /* upper bound of the rows of that side, the same at all members */
  int32_t stage;      /* MIMO_ROW_STAGE_* */
} mimo_row_exchange;

/* Where rows lie when other members reach for them: at their sender, or at their receiver. */
enum mimo_row_stage { MIMO_ROW_STAGE_SENDER = 0, MIMO_ROW_STAGE_RECEIVER = 1 };

/* How mimo_group_exchange_rows moves rows. */
enum mimo_row_transport {
  MIMO_ROW_TRANSPORT_HOST = 0,  /* through the host's shared memory */
  MIMO_ROW_TRANSPORT_PEERS = 1, /* GPUs of a host read and write each other's memory */
  MIMO_ROW_TRANSPORT_COUNTS = 2 /* NCCL's messages, for which the host has to know the ranges */
};

/* host_ranges [2, size, ranges, 3]: copies of send_ranges and receive_ranges; only MIMO_ROW_TRANSPORT_COUNTS reads it, for other
 * transports it may be null. */
MIMO_API int32_t mimo_group_exchange_rows(mimo_group* group, mimo_stream* stream, const mimo_row_exchange* rows,
                                          const int32_t* host_ranges, int64_t* ticket);
/* Prepares mimo_group_exchange_rows: every member calls it. `transport`: MIMO_ROW_TRANSPORT_*, the same at all. */
MIMO_API int32_t mimo_group_row_transport(mimo_group* group, mimo_stream* stream, int32_t* transport);
MIMO_API int32_t mimo_group_send(mimo_group* group, mimo_stream* stream, const void* x, int64_t bytes, int32_t to,
                                 int64_t* ticket);
MIMO_API int32_t mimo_group_receive(mimo_group* group, mimo_stream* stream, void* x, int64_t bytes, int32_t from,
                                    int64_t* ticket);
/* Returns when every member has called it. */
MIMO_API int32_t mimo_group_barrier(mimo_group* group);
/* host_y [size, bytes] = every member's host_x [bytes]; host memory, waits. With host_y null this member gives its own bytes and
 * waits for no others. */
MIMO_API int32_t mimo_group_exchange(mimo_group* group, const void* host_x, void* host_y, int64_t bytes);

/* ---- operations: matrix products ---------------------------------------------------------------------------- */

/* c = alpha * op(a) op(b) + beta * c + bias. op(a) is [m, k], op(b) [k, n]; a transposed operand is stored [k, m] or
 * [n, k]. `batch` products with the given element offsets between consecutive matrices. */
typedef struct mimo_gemm_args {
  const void* a;
  const void* b;
  void* c;
  const void* bias; /* [n] in b's dtype, or null */
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t a_stride;
  int64_t b_stride;
  int64_t c_stride;
  int64_t batch;
  int64_t a_batch_stride;
  int64_t b_batch_stride;
  int64_t c_batch_stride;
  float alpha;
  float beta;
  int32_t transpose_a;
  int32_t transpose_b;
  int32_t a_dtype;
  int32_t b_dtype;
  int32_t c_dtype;
  int32_t beside_collective; /* 1: one runs meanwhile, to which a GPU leaves some of its multiprocessors */
} mimo_gemm_args;
MIMO_API int32_t mimo_gemm(mimo_stream* stream, const mimo_gemm_args* args);

/* z = x wᵀ + bias and y = GELU(z), by tanh (MIMO_ACTIVATION_GELU_TANH). z is rounded to its type; y is the GELU of z as it is
 * rounded, or before, as the vendor's product has it. */
typedef struct mimo_gelu_gemm_forward_args {
  const void* x;    /* [rows, inputs] */
  const void* w;    /* [outputs, inputs] */
  const void* bias; /* [outputs] or null */
  void* z;          /* [rows, outputs] */
  void* y;          /* [rows, outputs] */
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
  int64_t x_stride;
  int32_t dtype; /* of all */
} mimo_gelu_gemm_forward_args;
MIMO_API int32_t mimo_gelu_gemm_forward(mimo_stream* stream, const mimo_gelu_gemm_forward_args* args);

/* dz = GELU'(z) (dy w): the gradient of z, whose GELU the product with w reads. */
typedef struct mimo_gelu_gemm_backward_args {
  const void* dy; /* [rows, outputs] */
  const void* w;  /* [outputs, inputs] */
  const void* z;  /* [rows, inputs] */
  void* dz;       /* [rows, inputs] */
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
  int64_t dy_stride;
  int32_t dtype; /* of all */
} mimo_gelu_gemm_backward_args;
MIMO_API int32_t mimo_gelu_gemm_backward(mimo_stream* stream, const mimo_gelu_gemm_backward_args* args);

/* Rows of group g, offsets[g] <= row < offsets[g+1], times that group's matrix. Groups may be empty.
 * transpose_b = 1: b is [groups, n, k] (a forward product with weights [out, in]); 0: [groups, k, n] (its input
 * gradient). Rows past offsets[groups] are left alone. */
typedef struct mimo_grouped_gemm_args {
  const void* a; /* [rows, k] */
  const void* b;
  void* c;                /* [rows, n] */
  const int32_t* offsets; /* [groups + 1] */
  int64_t rows;           /* upper bound of offsets[groups] */
  int64_t groups;
  int64_t n;
  int64_t k;
  int32_t transpose_b;
  int32_t a_dtype;
  int32_t b_dtype;
  int32_t c_dtype;
} mimo_grouped_gemm_args;
MIMO_API int32_t mimo_grouped_gemm(mimo_stream* stream, const mimo_grouped_gemm_args* args);

/* dw[g] = dy_gᵀ x_g, or dw[g] += dy_gᵀ x_g, for every group. A dw that is written is not read.
 *
 * MIMO_MLP_RECIPE_E4M3_BLOCKWISE: rows of a group are cut into blocks of 128 at their distance from its first row. A block of dy has
 * a factor for every column, a block of x for 128 columns. Products of a block's rows are summed in fp32, divided by both factors and
 * added to fp32 sums. Operands may be rows in e4m3, a byte an element, as e4m3_rows writes them: then blocks are rounded from
 * the numbers that are left. On GPUs: sm_90, both in bf16 or e4m3, n and k multiples of 16. */
typedef struct mimo_grouped_gemm_weight_gradient_args {
  const void* dy;          /* [rows, n] */
  const float* dy_factors; /* of a dy in e4m3, whose dy_dtype is u8; else null */
  const void* x;           /* [rows, k] */
  const float* x_factors;  /* as dy_factors */
  float* dw;               /* [groups, n, k] */
  const int32_t* offsets;
  int64_t rows;
  int64_t groups;
  int64_t n;
  int64_t k;
  int32_t accumulate; /* 1: added to dw, groups without rows are left alone; 0: theirs is zero */
  int32_t recipe;     /* MIMO_MLP_RECIPE_* */
  int32_t dy_dtype;
  int32_t x_dtype;
} mimo_grouped_gemm_weight_gradient_args;
MIMO_API int32_t mimo_grouped_gemm_weight_gradient(mimo_stream* stream,
                                                   const mimo_grouped_gemm_weight_gradient_args* args);

/* dbias[c] += sum over rows of dy[r][c]: gradient of a bias. */
typedef struct mimo_column_sum_args {
  const void* dy; /* [rows, width] */
  float* dbias;   /* [width] */
  const int32_t* row_count; /* or null */
  int64_t rows;
  int64_t width;
  int64_t stride;
  int32_t dtype;
} mimo_column_sum_args;
MIMO_API int32_t mimo_column_sum(mimo_stream* stream, const mimo_column_sum_args* args);

/* y = A x, or y += A x: A is sparse, in compressed rows. Row r of A x is the sum of values[i] * x[columns[i]] over
 * offsets[r] <= i < offsets[r + 1], in that order, fp32, one rounding. Interpolating a table, and inserting, dropping and
 * regrouping rows are such products; the transposed matrix gives their gradients. */
typedef struct mimo_spmm_args {
  const void* x;
  const int32_t* offsets; /* [rows + 1] */
  const int32_t* columns; /* [offsets[rows]] rows of x */
  const float* values;    /* [offsets[rows]], or null = 1 */
  void* y;                /* [rows, width] */
  int64_t rows;
  int64_t width;
  int64_t x_stride;
  int64_t y_stride;
  int32_t accumulate; /* 1: added to y, rows without entries are left alone */
  int32_t x_dtype;
  int32_t y_dtype;
} mimo_spmm_args;
MIMO_API int32_t mimo_spmm(mimo_stream* stream, const mimo_spmm_args* args);

/* ---- operations: norms -------------------------------------------------------------------------------------- */

/* h = x + residual, rounded to its type;  y = h * rsqrt(mean(h²) + epsilon) * weight, the mean over each run of
 * `group_size` columns. */
typedef struct mimo_rms_norm_forward_args {
  const void* x;
  const void* residual; /* stride = x_stride; or null: h = x */
  const void* weight;   /* [width] */
  void* sum;            /* h where there is a residual, else null; stride = width */
  void* y;
  float* rstd; /* [rows, width / group_size] */
  int64_t rows;
  int64_t width;
  int64_t group_size;
  int64_t x_stride;
  int64_t y_stride;
  float epsilon;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_rms_norm_forward_args;
MIMO_API int32_t mimo_rms_norm_forward(mimo_stream* stream, const mimo_rms_norm_forward_args* args);

/* dx = dresidual + gradient of the norm at x; dx may be dresidual itself. */
typedef struct mimo_rms_norm_backward_args {
  const void* dy;
  const void* x; /* the normalised input (h above) */
  const void* weight;
  const float* rstd;
  const void* dresidual; /* [rows, width] added to dx, or null */
  void* dx;
  float* dweight; /* [width], or null when the weight is frozen */
  int64_t rows;
  int64_t width;
  int64_t group_size;
  int64_t dy_stride;
  int64_t x_stride;
  int64_t dx_stride; /* of dx and dresidual */
  int32_t dtype;
  int32_t weight_dtype;
} mimo_rms_norm_backward_args;
MIMO_API int32_t mimo_rms_norm_backward(mimo_stream* stream, const mimo_rms_norm_backward_args* args);

/* h = x + residual, rounded to its type;  y = (h - mean) * rstd * weight + bias over rows of `width`, biased variance. */
typedef struct mimo_layer_norm_forward_args {
  const void* x;
  const void* residual; /* or null: h = x */
  const void* weight;
  const void* bias;
  void* sum; /* h where there is a residual, else null */
  void* y;
  float* mean; /* [rows] */
  float* rstd; /* [rows] */
  int64_t rows;
  int64_t width;
  float epsilon;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_layer_norm_forward_args;
MIMO_API int32_t mimo_layer_norm_forward(mimo_stream* stream, const mimo_layer_norm_forward_args* args);

typedef struct mimo_layer_norm_backward_args {
  const void* dy;
  const void* x; /* the normalised input (h above) */
  const void* weight;
  const float* mean;
  const float* rstd;
  const void* dresidual; /* or null */
  void* dx;
  float* dweight; /* or null */
  float* dbias;   /* or null */
  int64_t rows;
  int64_t width;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_layer_norm_backward_args;
MIMO_API int32_t mimo_layer_norm_backward(mimo_stream* stream, const mimo_layer_norm_backward_args* args);

/* ---- operations: activations -------------------------------------------------------------------------------- */

enum mimo_activation {
  MIMO_ACTIVATION_SQUARED_RELU = 0, /* max(x, 0)² */
  MIMO_ACTIVATION_SWIGLU = 1,       /* x₁ σ(x₁) x₂, gate half first */
  MIMO_ACTIVATION_QUICK_GEGLU = 2,  /* x₁ σ(1.702 x₁) (x₂ + linear_offset), gate half first */
  MIMO_ACTIVATION_GELU_TANH = 3,    /* 0.5 x (1 + tanh(0.7978845608 x (1 + 0.044715 x²))) */
  MIMO_ACTIVATION_GELU_ERF = 4      /* 0.5 x (1 + erf(x / sqrt 2)) */
};

/* y = probability of the row * activation(x). x is [rows, width], or [rows, 2 width] for the gated kinds: the gate half and
 * the linear half, or with `interleave` = s blocks of s gate columns and s linear columns in turn (s divides width). */
typedef struct mimo_activation_forward_args {
  const void* x;
  const float* row_probability; /* [rows], or null = 1 */
  void* y;                      /* [rows, width] */
  const int32_t* row_count;     /* or null */
  int64_t rows;
  int64_t width;
  int64_t interleave;  /* 0: halves */
  float clamp;         /* gate above, linear half both sides; infinity = none */
  float linear_offset; /* quick GeGLU */
  int32_t kind;
  int32_t dtype;
} mimo_activation_forward_args;
MIMO_API int32_t mimo_activation_forward(mimo_stream* stream, const mimo_activation_forward_args* args);

typedef struct mimo_activation_backward_args {
  const void* dy;
  const void* x;
  const float* row_probability; /* or null */
  void* dx;
  float* drow_probability; /* [rows], written; or null */
  const int32_t* row_count;
  int64_t rows;
  int64_t width;
  int64_t interleave;
  float clamp;
  float linear_offset;
  int32_t kind;
  int32_t dtype;
} mimo_activation_backward_args;
MIMO_API int32_t mimo_activation_backward(mimo_stream* stream, const mimo_activation_backward_args* args);

/* ---- operations: feed-forward layers of experts -------------------------------------------------------------- */

/* y_r += factor_r * bias_g for the rows r of every group g; the sum is fp32, one rounding. */
typedef struct mimo_grouped_bias_forward_args {
  const void* bias;       /* [groups, width] */
  const float* factor;    /* [rows], or null = 1 */
  const int32_t* offsets; /* [groups + 1], or null: one group of all rows */
  void* y;                /* [rows, width] */
  int64_t rows;           /* upper bound of offsets[groups] */
  int64_t groups;
  int64_t width;
  int32_t dtype; /* of bias and y */
} mimo_grouped_bias_forward_args;
MIMO_API int32_t mimo_grouped_bias_forward(mimo_stream* stream, const mimo_grouped_bias_forward_args* args);

/* dbias_g += sum over the group's rows of factor_r dy_r; dfactor_r = sum over columns of dy_r bias_g. The rows of a group
 * are summed in runs cut at their distance from its first row, and the runs in order. */
typedef struct mimo_grouped_bias_backward_args {
  const void* dy;      /* [rows, width] */
  const void* bias;    /* [groups, width]; read for dfactor alone, else it may be null */
  const float* factor; /* or null = 1 */
  const int32_t* offsets;
  float* dbias;   /* [groups, width], added to; or null */
  float* dfactor; /* [rows]; or null */
  int64_t rows;
  int64_t groups;
  int64_t width;
  int32_t accumulate_dfactor; /* 1: added to dfactor; 0: written */
  int32_t dtype;
} mimo_grouped_bias_backward_args;
MIMO_API int32_t mimo_grouped_bias_backward(mimo_stream* stream, const mimo_grouped_bias_backward_args* args);

/* How grouped_mlp multiplies, and how grouped_gemm_weight_gradient does: the gradient of a layer in e4m3 may be plain. */
enum mimo_mlp_recipe {
  MIMO_MLP_RECIPE_PLAIN = 0, /* operands as they are stored */
  /* Operands are rounded to e4m3 (docs/spec/moe-performance.md §1.7): rows in runs of 128 columns, matrices in blocks of 128 x
   * 128 by e4m3_matrices, each times its own power of two. Products of 128 columns are summed in fp32, divided by both
   * factors and added to fp32 sums. On GPUs: sm_90, storage in bf16, hidden and width multiples of 16. */
  MIMO_MLP_RECIPE_E4M3_BLOCKWISE = 1
};

/* Matrices rounded to e4m3 in blocks of 128 x 128, cut short at the ends (docs/spec/moe-performance.md §1.7). A block is
 * multiplied by the largest power of two that keeps it within 448; its factor is that power's inverse. Not finite: NaN. */
typedef struct mimo_e4m3_matrices_args {
  const void* matrices; /* [count, rows, width] */
  void* values;         /* [count, rows, width], a byte an element */
  void* transposed;     /* [count, width, rows]: the same values; or null */
  float* factors;       /* [count, ceil(rows / 128), ceil(width / 128)] */
  int64_t count;
  int64_t rows;
  int64_t width;
  int32_t dtype; /* of matrices: f32 or bf16; GPUs: bf16, rows and width multiples of 16 */
} mimo_e4m3_matrices_args;
MIMO_API int32_t mimo_e4m3_matrices(mimo_stream* stream, const mimo_e4m3_matrices_args* args);

/* Rows rounded to e4m3 in runs of 128 columns, the last one cut short, by the rule of e4m3_matrices. */
typedef struct mimo_e4m3_rows_args {
  const void* x;            /* [rows, width] */
  const int32_t* row_count; /* on the device: later rows are left alone */
  void* values;             /* [rows, width], a byte an element */
  float* factors;           /* [ceil(width / 128), rows rounded up to 4] what a run's bytes are multiplied by */
  int64_t rows;
  int64_t width;
  int32_t dtype; /* of x: f32 or bf16; GPUs: bf16, width a multiple of 16 */
} mimo_e4m3_rows_args;
MIMO_API int32_t mimo_e4m3_rows(mimo_stream* stream, const mimo_e4m3_rows_args* args);

/* Both projections of the experts of a layer and the activation between them, for rows sorted by expert (group):
 *
 *     z_r  = x_r w1_gᵀ + b1_g                    [z_width]; stored, and read by the activation as stored
 *     hs_r = p_r * activation(z_r)               [width]; fp32, rounded once
 *     y_r  = hs_r w2_gᵀ + p_r * b2_g             [hidden]; fp32, rounded once
 *
 * z_width is width, or 2 width for the gated kinds, whose columns of z (rows of w1 and b1) are the gate half and the linear
 * half or, with `interleave` = s, blocks of s gate columns and s linear columns in turn. p is fp32 from end to end. The
 * bias b1 is not weighted by p; the rows that leave are added up without weights, so p weighs b2.
 *
 * Groups may be empty, all of them too. Rows from offsets[groups] on are neither read nor written, in any operand.
 *
 * A training step runs _forward with z and keeps x, z and row_probability; runs _backward, which gives the gradients of the
 * rows, of row_probability and of the biases, and dz and hs, which the gradients of the weights read; and then, at once or
 * later, grouped_gemm_weight_gradient twice: dw2 of (dy, hs), dw1 of (dz, x). The sums behind dp, db1 and db2 have an order
 * that the sizes and offsets alone decide.
 *
 * Kernels may keep dhs (of _backward) in fp32 or round it once to `dtype`. Every shape works; fast kernels take bf16 with hidden
 * and width multiples of 64. */
typedef struct mimo_grouped_mlp_forward_args {
  const void* x;                /* [rows, hidden]; or null, where x_e4m3 is given */
  const void* x_e4m3;           /* e4m3: x as e4m3_rows and moe_permute round it, or null: it is rounded here */
  const float* x_factors;       /* of x_e4m3, MIMO_E4M3_SPARE_FACTORS behind them; or null */
  const void* w1;               /* [groups, z_width, hidden]; e4m3: its values */
  const float* w1_factors;      /* e4m3: of e4m3_matrices; else null */
  const void* b1;               /* [groups, z_width], or null */
  const void* w2;               /* [groups, hidden, width]; e4m3: its values */
  const float* w2_factors;
  const void* b2;               /* [groups, hidden], or null */
  const float* row_probability; /* p, [rows]; or null = 1 */
  const int32_t* offsets;       /* [groups + 1], on the device */
  void* z;                      /* [rows, z_width]; or null: no backward will come */
  void* y;                      /* [rows, hidden] */
  int64_t rows;                 /* upper bound of offsets[groups] */
  int64_t groups;
  int64_t hidden;
  int64_t width;
  int64_t interleave;  /* gated kinds: rows of a block, which divide width; 0: halves */
  float clamp;         /* gated kinds: gate above, linear half both sides; infinity = none */
  float linear_offset; /* quick GeGLU */
  int32_t kind;        /* MIMO_ACTIVATION_* */
  int32_t recipe;      /* MIMO_MLP_RECIPE_* */
  int32_t dtype;       /* of all but row_probability, offsets and e4m3's matrices: f32 or bf16 */
} mimo_grouped_mlp_forward_args;
MIMO_API int32_t mimo_grouped_mlp_forward(mimo_stream* stream, const mimo_grouped_mlp_forward_args* args);

/* With a_r = activation(z_r), made anew (p may be 0), and dhs_r = dy_r w2_g:
 *
 *     dp_r  = dhs_r · a_r + dy_r · b2_g          fp32
 *     dz_r  = p_r * dhs_r * activation'(z_r)     rounded once; a value on the limit of a clamped half lets its gradient through
 *     hs_r  = p_r * a_r                          as in _forward
 *     dx_r  = dz_r w1_g
 *     db1_g += Σ dz_r (as stored),  db2_g += Σ p_r dy_r      over the group's rows */
typedef struct mimo_grouped_mlp_backward_args {
  const void* dy;          /* [rows, hidden]; or null, where dy_e4m3 is given and neither db2 nor drow_probability with a b2 asks */
  const void* dy_e4m3;     /* as x_e4m3 */
  const float* dy_factors; /* as x_factors */
  const void* z;           /* of _forward */
  const void* w1;          /* e4m3: its transposed values */
  const float* w1_factors;
  const void* w2; /* e4m3: its transposed values */
  const float* w2_factors;
  const void* b2;               /* or null; read for drow_probability alone */
  const float* row_probability; /* or null = 1 */
  const int32_t* offsets;
  void* dx;                /* [rows, hidden], or null */
  void* dz;                /* [rows, z_width]; or null, where dz_e4m3 is given and no db1 */
  void* dz_e4m3;           /* e4m3: dz as e4m3_rows rounds it; or null */
  float* dz_factors;       /* of dz_e4m3, MIMO_E4M3_SPARE_FACTORS behind them; or null */
  void* hs;                /* [rows, width]; or null: w2 gets no gradient, or hs_e4m3 is given */
  void* hs_e4m3;           /* e4m3: hs as e4m3_rows rounds it; or null */
  float* hs_factors;       /* of hs_e4m3; or null */
  float* drow_probability; /* dp, [rows], written; or null */
  float* db1;              /* [groups, z_width], added to; or null */
  float* db2;              /* [groups, hidden], added to; or null */
  int64_t rows;
  int64_t groups;
  int64_t hidden;
  int64_t width;
  int64_t interleave;
  float clamp;
  float linear_offset;
  int32_t kind;
  int32_t recipe;
  int32_t dtype;
} mimo_grouped_mlp_backward_args;
MIMO_API int32_t mimo_grouped_mlp_backward(mimo_stream* stream, const mimo_grouped_mlp_backward_args* args);

/* ---- operations: Mamba-2 ------------------------------------------------------------------------------------ */

/* Depthwise causal convolution and SiLU: p[t,c] = bias[c] + Σ_k weight[c,k] x[t - width + 1 + k, c], y = p σ(p).
 * Taps left of a sequence's first token are zero. */
typedef struct mimo_causal_conv1d_forward_args {
  const void* x;      /* [T, channels] */
  const void* weight; /* [channels, width] */
  const void* bias;   /* [channels] */
  void* y;
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t channels;
  int64_t width;
  int64_t x_stride;
  int64_t y_stride;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_causal_conv1d_forward_args;
MIMO_API int32_t mimo_causal_conv1d_forward(mimo_stream* stream, const mimo_causal_conv1d_forward_args* args);

typedef struct mimo_causal_conv1d_backward_args {
  const void* dy;
  const void* x;
  const void* weight;
  const void* bias;
  void* dx;
  float* dweight; /* [channels, width], or null */
  float* dbias;   /* [channels], or null */
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t channels;
  int64_t width;
  int64_t dy_stride;
  int64_t x_stride;
  int64_t dx_stride;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_causal_conv1d_backward_args;
MIMO_API int32_t mimo_causal_conv1d_backward(mimo_stream* stream, const mimo_causal_conv1d_backward_args* args);

/* Causal convolution of one more token of S sequences: `state` holds the last width - 1 inputs of many sequences, oldest
 * first, those of sequence s at slots[s]; they move on by one. No two slots are equal. */
typedef struct mimo_causal_conv1d_step_args {
  const void* x;        /* [S, channels] */
  const void* weight;   /* [channels, width] */
  const void* bias;     /* [channels] */
  void* state;          /* [.., width - 1, channels], of x's dtype */
  const int32_t* slots; /* [S] */
  void* y;              /* [S, channels] */
  int64_t sequences;
  int64_t channels;
  int64_t width;
  int64_t x_stride;
  int64_t y_stride;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_causal_conv1d_step_args;
MIMO_API int32_t mimo_causal_conv1d_step(mimo_stream* stream, const mimo_causal_conv1d_step_args* args);

/* Mamba-2 state space scan with its gate (docs/spec/language-model.md §2.2, §2.3). Per head j of group j / (H/G):
 *   Δ = max(softplus(dt + dt_bias), dt_minimum),  a = -exp(A_log) Δ,  h_t = exp(a_t) h_{t-1} + Δ_t x_t ⊗ B_t,  y_t = h_t C_t + D x_t
 *   o = y silu(z_factors z). The state starts at zero in every sequence. */
typedef struct mimo_ssd_forward_args {
  const void* x;        /* [T, H P] */
  const void* b;        /* [T, G N] */
  const void* c;        /* [T, G N] */
  const void* z;        /* [T, H P] */
  const void* dt;       /* [T, H] before bias and softplus */
  const float* dt_bias; /* [H] */
  const float* a_log;   /* [H] */
  const float* d;       /* [H] */
  const float* z_factors; /* [H P], or null = 1 */
  void* o;              /* [T, H P] contiguous, gated output */
  void* y;              /* [T, H P] contiguous, output before the gate, kept for backward; or null */
  float* final_state;   /* [S, H, P, N] the state after the last token of every sequence; or null */
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
  int64_t groups;
  int64_t state_dim;
  int64_t chunk_size; /* at most; no result depends on it but for rounding */
  int64_t xbc_stride; /* row stride of x, b and c */
  int64_t z_stride;
  int64_t dt_stride;
  float dt_minimum; /* 0: no limit; where it holds, Δ has no gradient */
  int32_t dtype;
} mimo_ssd_forward_args;
MIMO_API int32_t mimo_ssd_forward(mimo_stream* stream, const mimo_ssd_forward_args* args);

typedef struct mimo_ssd_backward_args {
  const void* d_o; /* [T, H P] contiguous */
  const void* x;
  const void* b;
  const void* c;
  const void* z;
  const void* dt;
  const void* y; /* as saved by forward */
  const float* dt_bias;
  const float* a_log;
  const float* d;
  const float* z_factors; /* or null */
  void* dx; /* strides as dxbc_stride */
  void* db;
  void* dc;
  void* dz;        /* stride dz_stride */
  void* ddt;       /* stride ddt_stride */
  float* ddt_bias; /* [H], or null */
  float* da_log;   /* [H], or null */
  float* dd;       /* [H], or null */
  float* dz_factors; /* [H P], or null */
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
  int64_t groups;
  int64_t state_dim;
  int64_t chunk_size; /* at most; no result depends on it but for rounding */
  int64_t xbc_stride;
  int64_t z_stride;
  int64_t dt_stride;
  int64_t dxbc_stride;
  int64_t dz_stride;
  int64_t ddt_stride;
  float dt_minimum;
  int32_t dtype;
} mimo_ssd_backward_args;
MIMO_API int32_t mimo_ssd_backward(mimo_stream* stream, const mimo_ssd_backward_args* args);

/* The scan of ssd_forward for one more token of S sequences: `state` holds the states of many, as ssd_forward leaves them, the
 * state of sequence s at slots[s]; it moves on by one token. No two slots are equal. */
typedef struct mimo_ssd_step_args {
  const void* x;        /* [S, H P] */
  const void* b;        /* [S, G N] */
  const void* c;        /* [S, G N] */
  const void* z;        /* [S, H P] */
  const void* dt;       /* [S, H] before bias and softplus */
  const float* dt_bias; /* [H] */
  const float* a_log;   /* [H] */
  const float* d;       /* [H] */
  float* state;         /* [.., H, P, N] */
  const int32_t* slots; /* [S] */
  void* o;              /* [S, H P] contiguous, gated output */
  int64_t sequences;
  int64_t heads;
  int64_t head_dim;
  int64_t groups;
  int64_t state_dim;
  int64_t xbc_stride; /* row stride of x, b and c */
  int64_t z_stride;
  int64_t dt_stride;
  float dt_minimum;
  int32_t dtype;
} mimo_ssd_step_args;
MIMO_API int32_t mimo_ssd_step(mimo_stream* stream, const mimo_ssd_step_args* args);

/* ---- operations: attention ---------------------------------------------------------------------------------- */

enum mimo_attention_mask { MIMO_ATTENTION_FULL = 0, MIMO_ATTENTION_CAUSAL = 1 };

/* Attention within each sequence. Query head i = g * (query_heads / key_heads) + r reads key head g. Element of query
 * head (g, r): q[t * token_stride + g * group_stride + r * head_dim + d]; of key or value head g:
 * k[t * token_stride + g * group_stride + d]: a fused [q…q k v] projection is read in place.
 * Dropout keeps a probability where u >= dropout, u of the word mimo_dropout would take for the element index
 * ((first_token + token) * full_heads + first_head + query head) * 2^32 + key position in the sequence: the mask is
 * the same under every packing and tensor-parallel layout. */
typedef struct mimo_attention_forward_args {
  const void* q;
  const void* k;
  const void* v;
  void* o;    /* [T, query_heads * head_dim] contiguous */
  float* lse; /* [T, query_heads] log-sum-exp of the scaled scores, kept for backward */
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t max_seqlen;
  int64_t query_heads;
  int64_t key_heads;
  int64_t head_dim;
  int64_t token_stride;
  int64_t group_stride;
  int64_t dropout_seed;
  int64_t first_token; /* global index of token 0, for dropout */
  int64_t first_head;  /* of query head 0 in the layer, for dropout */
  int64_t full_heads;  /* query heads of the layer, for dropout */
  float softmax_scale;
  float dropout;
  int32_t mask;
  int32_t dtype;
} mimo_attention_forward_args;
MIMO_API int32_t mimo_attention_forward(mimo_stream* stream, const mimo_attention_forward_args* args);

/* dq, dk, dv lie like q, k, v, with a token stride of their own; all of them are written. */
typedef struct mimo_attention_backward_args {
  const void* d_o;
  const void* q;
  const void* k;
  const void* v;
  const void* o;
  const float* lse;
  void* dq;
  void* dk;
  void* dv;
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t max_seqlen;
  int64_t query_heads;
  int64_t key_heads;
  int64_t head_dim;
  int64_t token_stride;
  int64_t group_stride;
  int64_t d_o_stride;     /* elements between tokens of d_o */
  int64_t d_token_stride; /* of dq, dk and dv */
  int64_t dropout_seed;
  int64_t first_token;
  int64_t first_head;
  int64_t full_heads;
  float softmax_scale;
  float dropout;
  int32_t mask;
  int32_t dtype;
} mimo_attention_backward_args;
MIMO_API int32_t mimo_attention_backward(mimo_stream* stream, const mimo_attention_backward_args* args);

/* Causal attention of one more token of S sequences. q, k and v lie as in attention_forward, a token a sequence. `keys` and
 * `values` hold the tokens of many sequences, a run of rows each: those of sequence s from first_rows[s] on, lengths[s] of
 * them so far. Its new key and value become the next row; its query sees them and all before. */
typedef struct mimo_attention_step_args {
  const void* q;
  const void* k;
  const void* v;
  void* keys;                /* [key_heads, rows, head_dim] */
  void* values;              /* [key_heads, rows, head_dim] */
  const int32_t* first_rows; /* [S] */
  const int32_t* lengths;    /* [S] */
  void* o;                   /* [S, query_heads * head_dim] contiguous */
  int64_t sequences;
  int64_t rows;
  int64_t max_length; /* no length is greater */
  int64_t query_heads;
  int64_t key_heads;
  int64_t head_dim;
  int64_t token_stride;
  int64_t group_stride;
  float softmax_scale;
  int32_t dtype;
} mimo_attention_step_args;
MIMO_API int32_t mimo_attention_step(mimo_stream* stream, const mimo_attention_step_args* args);

/* Rotary position embedding: the first rotary_dim columns [x₁ x₂] of a head become [x₁ cos - x₂ sin, x₂ cos + x₁ sin],
 * halves of rotary_dim / 2 columns, angle_i = angle_scale * position * base^(-2i / rotary_dim). Positions restart with
 * every sequence, from 0 or where first_positions says. A token is `groups` groups of heads_per_group heads. The first
 * rotated_per_group heads of a group turn; the others (values) and columns past rotary_dim are copied. angle_scale -1 turns back: the gradient. y may be x. */
typedef struct mimo_rope_forward_args {
  const void* x;
  void* y;
  const int32_t* cu_seqlens;
  const int32_t* first_positions; /* [sequences] position of a sequence's first token here; or null = 0 */
  int64_t sequences;
  int64_t tokens;
  int64_t max_seqlen;
  int64_t groups;
  int64_t heads_per_group;
  int64_t rotated_per_group;
  int64_t head_dim;
  int64_t rotary_dim;
  int64_t x_stride;
  int64_t y_stride;
  float base;
  float angle_scale;
  int32_t dtype;
} mimo_rope_forward_args;
MIMO_API int32_t mimo_rope_forward(mimo_stream* stream, const mimo_rope_forward_args* args);

/* ---- operations: mixture of experts ------------------------------------------------------------------------- */

enum mimo_score_function { MIMO_SCORE_SIGMOID = 0, MIMO_SCORE_SOFTMAX = 1 };

/* Scores, top-k selection and routing weights (docs/spec/language-model.md §4.2), and the statistics of the balancing
 * loss (§4.4: from unbiased normalised scores, counted per sequence). Ties go to the lower expert index. softmax: after
 * top-k over the selected logits, or before it when pre_softmax = 1. Padding tokens are routed like any other, but stay
 * out of every count and sum. The three sequence_ arrays are given together or not at all. */
typedef struct mimo_router_forward_args {
  const float* logits;         /* [T, E] */
  const float* expert_bias;    /* [E], or null; sigmoid only */
  const uint8_t* padding_mask; /* [T] 1 = padding, or null */
  const int32_t* cu_seqlens;   /* read for the sequence_ arrays only; null without them */
  float* scores;               /* [T, E]: sigmoid, or full softmax */
  float* probabilities;        /* [T, K] routing weights */
  int32_t* expert_index;       /* [T, K] ascending expert index per token */
  int32_t* tokens_per_expert;  /* [E], added to; or null */
  float* sequence_counts;      /* [S, E] tokens whose unbiased top-k holds e; or null */
  float* sequence_score_sums;  /* [S, E] Σ_t of the normalised scores; or null */
  float* sequence_tokens;      /* [S] tokens that are not padding; or null */
  int64_t sequences;
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  int64_t expert_groups; /* 1 = no group limit */
  int64_t group_topk;
  /* A group's score is the sum of this many best values of those that decide the choice: biased sigmoid scores,
   * probabilities with pre_softmax = 1, logits with softmax after top-k. topk / group_topk in Megatron, 2 in HF. */
  int64_t group_score_topk;
  float scaling_factor;
  int32_t score_function;
  int32_t pre_softmax;
} mimo_router_forward_args;
MIMO_API int32_t mimo_router_forward(mimo_stream* stream, const mimo_router_forward_args* args);

/* loss += coefficient E / (K sequences) Σ_q Σ_e counts[q,e] sums[q,e] / tokens_q², tokens_q = sequence_tokens[q] times
 * sequence_shards; a sequence without tokens adds nothing. dnormalised[q,e] += gradient_scale * ∂loss/∂(one token's
 * normalised score). With sequences = 1 (the whole microbatch as one) every row of dnormalised gets the same. */
typedef struct mimo_router_balancing_loss_args {
  const float* sequence_counts;
  const float* sequence_score_sums;
  const float* sequence_tokens;
  float* dnormalised; /* [dnormalised_rows, E], added to; or null */
  float* loss;        /* [1], added to; or null */
  int64_t dnormalised_rows; /* sequences, unless that is 1 */
  int64_t sequences;
  int64_t experts;
  int64_t topk;
  int64_t sequence_shards;
  float coefficient;
  float gradient_scale;
} mimo_router_balancing_loss_args;
MIMO_API int32_t mimo_router_balancing_loss(mimo_stream* stream, const mimo_router_balancing_loss_args* args);

/* z_loss += Σ_t logsumexp(logits_t)² over the tokens that are not padding (not yet divided or weighted). */
typedef struct mimo_router_z_loss_args {
  const float* logits;
  const uint8_t* padding_mask; /* or null */
  float* z_loss; /* [1], added to */
  int64_t tokens;
  int64_t experts;
} mimo_router_z_loss_args;
MIMO_API int32_t mimo_router_z_loss(mimo_stream* stream, const mimo_router_z_loss_args* args);

typedef struct mimo_router_backward_args {
  const float* logits;
  const float* scores;
  const float* probabilities;
  const int32_t* expert_index;
  const float* dprobabilities; /* [T, K] */
  const float* dnormalised;    /* [S, E] from the balancing loss, or null */
  const uint8_t* padding_mask; /* or null; padding tokens get no gradient from dnormalised and the z-loss */
  const int32_t* cu_seqlens;   /* null when dnormalised is */
  float* dlogits;              /* [T, E] */
  int64_t sequences;
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  float scaling_factor;
  float z_loss_scale; /* gradient of Σ logsumexp² is multiplied by this; 0 = no z-loss */
  int32_t score_function;
  int32_t pre_softmax;
} mimo_router_backward_args;
MIMO_API int32_t mimo_router_backward(mimo_stream* stream, const mimo_router_backward_args* args);

/* Order in which token copies are processed: rows sorted by (expert, token). A slot is token * K + choice. */
typedef struct mimo_moe_sort_args {
  const int32_t* expert_index; /* [T, K]; -1 (anything outside 0 .. E-1) = dropped */
  int32_t* offsets;            /* [E + 1] first row of every expert; the last is the number of rows */
  int32_t* row_of_slot;        /* [T K]; -1 for a dropped slot */
  int32_t* slot_of_row;        /* [T K] */
  int64_t tokens;
  int64_t topk;
  int64_t experts;
} mimo_moe_sort_args;
MIMO_API int32_t mimo_moe_sort(mimo_stream* stream, const mimo_moe_sort_args* args);

/* Where the rows of an exchange between the ranks that hold experts come from and go to. Members are in expert-parallel order, the
 * `expert_tensor` members of an expert side by side; expert e is local expert e mod local_experts of the members of
 * e / local_experts. Rows lie in expert order where their tokens are; where their expert is, by (local expert, member, row).
 * Ranges are what mimo_group_exchange_rows reads: first row here, first row at the member, rows; one for each local expert of the
 * receiver of the way out. On the way back rows of the p-th member of an expert come to rows p * region_rows and on.
 * A member has room for `capacity` rows: the last rows, which do not fit, stay away, in both directions. */
typedef struct mimo_expert_exchange_plan_args {
  const int32_t* offsets;    /* [members, experts + 1]: every member's first rows of all experts */
  int32_t* out_send;         /* [members, local_experts, 3] */
  int32_t* out_receive;      /* [members, local_experts, 3] */
  int32_t* back_send;        /* [members, local_experts, 3] */
  int32_t* back_receive;     /* [members, local_experts, 3] */
  int32_t* local_offsets;    /* [local_experts + 1]: first row of each expert of this member */
  int32_t* overflow;         /* [2], or null: the most rows that this member was sent and had no room for, and its room then */
  int64_t members;
  int64_t member; /* this one */
  int64_t expert_tensor;
  int64_t local_experts;
  int64_t capacity;
  int64_t region_rows;
} mimo_expert_exchange_plan_args;
MIMO_API int32_t mimo_expert_exchange_plan(mimo_stream* stream, const mimo_expert_exchange_plan_args* args);

/* The nodes that hold a token's experts, each once: a token's row goes to each of them once, whatever the number of its experts
 * there. Expert e lies on node e / node_experts. Beside the row goes its routing, from which the node finds its own experts. */
typedef struct mimo_moe_token_nodes_args {
  const int32_t* expert_index; /* [T, K]; outside 0 .. nodes node_experts - 1 = dropped */
  const float* probabilities;  /* [T, K] */
  int32_t* node_index;         /* [T, W]: in the order of the first choice that lies there, then -1 */
  float* routing;              /* [T, 2 K]: experts as numbers, -1 = dropped; then probabilities */
  int64_t tokens;
  int64_t topk;
  int64_t nodes;
  int64_t node_experts;
  int64_t node_slots; /* W, at least the smaller of K and nodes */
} mimo_moe_token_nodes_args;
MIMO_API int32_t mimo_moe_token_nodes(mimo_stream* stream, const mimo_moe_token_nodes_args* args);

/* Experts of one node in the routing that came beside rows. */
typedef struct mimo_moe_node_experts_args {
  const float* routing;     /* [R, 2 K] of mimo_moe_token_nodes */
  const int32_t* row_count; /* rows that are live, or null = R */
  int32_t* expert_index;    /* [R, K] counted from first_expert; -1: of another node, dropped, or of a row that is not live */
  float* probabilities;     /* [R, K]; 0 where the index is -1 */
  int64_t rows;
  int64_t topk;
  int64_t first_expert;
  int64_t experts;
} mimo_moe_node_experts_args;
MIMO_API int32_t mimo_moe_node_experts(mimo_stream* stream, const mimo_moe_node_experts_args* args);

/* rows[r] = x[slot_of_row[r] / K], row_probability[r] = probabilities[slot_of_row[r]]. Backward of moe_unpermute. The rows may be
 * written in e4m3 too, as e4m3_rows rounds them, or in e4m3 alone. */
typedef struct mimo_moe_permute_args {
  const void* x;              /* [T, width] */
  const float* probabilities; /* [T, K], or null */
  const int32_t* slot_of_row; /* [T K] */
  const int32_t* row_count;   /* offsets + E, or null = T K */
  void* rows;                 /* [T K, width]; or null, where e4m3 is given */
  float* row_probability;     /* [T K], or null */
  void* e4m3;                 /* [T K, width] a byte an element, or null; GPUs: bf16, width a multiple of 16 */
  float* e4m3_factors;        /* [ceil(width / 128), T K rounded up to 4] what a run's bytes are multiplied by; or null */
  int64_t tokens;
  int64_t topk;
  int64_t width;
  int32_t dtype;
} mimo_moe_permute_args;
MIMO_API int32_t mimo_moe_permute(mimo_stream* stream, const mimo_moe_permute_args* args);

/* y[t] = Σ_k rows[row_of_slot[t, k]], fp32 sum, one rounding; probabilities[slot] = row_probability[row_of_slot[slot]]
 * (0 for a dropped slot). Backward of moe_permute. */
typedef struct mimo_moe_unpermute_args {
  const void* rows;             /* [T K, width] */
  const float* row_probability; /* or null */
  const int32_t* row_of_slot;
  void* y;              /* [T, width] */
  float* probabilities; /* [T, K], or null */
  int64_t tokens;
  int64_t topk;
  int64_t width;
  int32_t dtype;
} mimo_moe_unpermute_args;
MIMO_API int32_t mimo_moe_unpermute(mimo_stream* stream, const mimo_moe_unpermute_args* args);

/* bias[e] += rate * sign(mean(counts) - counts[e]); counts are then zero. */
typedef struct mimo_router_bias_update_args {
  float* bias;     /* [E] */
  int32_t* counts; /* [E] */
  int64_t experts;
  float rate;
} mimo_router_bias_update_args;
MIMO_API int32_t mimo_router_bias_update(mimo_stream* stream, const mimo_router_bias_update_args* args);

/* ---- operations: elastic masks ------------------------------------------------------------------------------ */

/* Factors of masks (docs/spec/elastic.md §9): factors[b][i] = values[b][sources[i]], 1 where the source is -1. */
typedef struct mimo_mask_factors_forward_args {
  const float* values;    /* [batch, value_count] */
  const int32_t* sources; /* [factor_count] below value_count */
  float* factors;         /* [batch, factor_count] */
  int64_t batch;
  int64_t value_count;
  int64_t factor_count;
} mimo_mask_factors_forward_args;
MIMO_API int32_t mimo_mask_factors_forward(mimo_stream* stream, const mimo_mask_factors_forward_args* args);

/* dvalues[b][v] += sum of dfactors[b][i] over the factors i of source v: members[starts[v]] to members[starts[v + 1] - 1]. */
typedef struct mimo_mask_factors_backward_args {
  const float* dfactors; /* [batch, factor_count] */
  const int32_t* members;
  const int32_t* starts; /* [value_count + 1] */
  float* dvalues;        /* [batch, value_count] */
  int64_t batch;
  int64_t value_count;
  int64_t factor_count;
} mimo_mask_factors_backward_args;
MIMO_API int32_t mimo_mask_factors_backward(mimo_stream* stream, const mimo_mask_factors_backward_args* args);

/* y[r][c] = addend[r][c] + scale factors[c] x[r][c] (docs/spec/elastic.md §9). */
typedef struct mimo_mask_columns_forward_args {
  const void* x;
  const void* addend;   /* [rows, width], or null = 0 */
  const float* factors; /* [width], or null = 1 */
  const float* scale;   /* [1], or null = 1 */
  void* y;
  const int32_t* row_count; /* or null */
  int64_t rows;
  int64_t width;
  int64_t x_stride;
  int64_t addend_stride;
  int64_t y_stride;
  int32_t dtype;
} mimo_mask_columns_forward_args;
MIMO_API int32_t mimo_mask_columns_forward(mimo_stream* stream, const mimo_mask_columns_forward_args* args);

/* dx[r][c] = scale factors[c] dy[r][c]. With S_c = sum over the rows of dy[r][c] x[r][c]: dfactors[c] += scale S_c, and
 * dscale[c] += factors[c] S_c, the part of column c in the gradient of the scale. */
typedef struct mimo_mask_columns_backward_args {
  const void* dy;
  const void* x; /* or null where neither sum is wanted */
  const float* factors; /* or null */
  const float* scale;   /* or null */
  void* dx;             /* or null */
  float* dfactors;      /* [width], or null */
  float* dscale;        /* [width], or null */
  const int32_t* row_count; /* or null */
  int64_t rows;
  int64_t width;
  int64_t dy_stride;
  int64_t x_stride;
  int64_t dx_stride;
  int32_t accumulate; /* 1: dx is added to */
  int32_t x_dtype;
  int32_t gradient_dtype; /* of dy and dx */
} mimo_mask_columns_backward_args;
MIMO_API int32_t mimo_mask_columns_backward(mimo_stream* stream, const mimo_mask_columns_backward_args* args);

/* The norm of masked columns: y = scale h rsqrt(mean(h²) + epsilon) weight of groups of columns, h = factors x. With a
 * residual, h = factors (residual + x_scale x_factors x), the sum rounded to its type as mask_columns_forward has it. */
typedef struct mimo_masked_rms_norm_forward_args {
  const void* x;
  const void* residual;   /* stride = x_stride; or null */
  const float* x_factors; /* [width], or null = 1; without a residual it is null */
  const float* x_scale;   /* [1], or null = 1; without a residual it is null */
  const void* weight;     /* [width] */
  const float* factors;   /* [width], or null = 1 */
  const float* scale;     /* [1], or null = 1 */
  void* sum;              /* of x and the residual where there is one, else null; stride = width */
  void* y;
  float* rstd; /* [rows, width / group_size] */
  int64_t rows;
  int64_t width;
  int64_t group_size;
  int64_t x_stride;
  int64_t y_stride;
  float epsilon;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_masked_rms_norm_forward_args;
MIMO_API int32_t mimo_masked_rms_norm_forward(mimo_stream* stream, const mimo_masked_rms_norm_forward_args* args);

/* dx = dresidual + gradient of the norm at x; dx may be dresidual itself. */
typedef struct mimo_masked_rms_norm_backward_args {
  const void* dy;
  const void* x; /* the normalised input before its factors: the sum where there was a residual */
  const void* weight;
  const float* factors; /* or null */
  const float* scale;   /* or null */
  const float* rstd;
  const void* dresidual; /* [rows, width] added to dx, or null */
  void* dx;
  float* dweight;  /* [width], or null when the weight is frozen */
  float* dfactors; /* [width], or null */
  float* dscale;   /* [width]: every column's part of the gradient of the scale; or null */
  int64_t rows;
  int64_t width;
  int64_t group_size;
  int64_t dy_stride;
  int64_t x_stride;
  int64_t dx_stride; /* of dx and dresidual */
  int32_t dtype;
  int32_t weight_dtype;
} mimo_masked_rms_norm_backward_args;
MIMO_API int32_t mimo_masked_rms_norm_backward(mimo_stream* stream, const mimo_masked_rms_norm_backward_args* args);

/* y = probability of the row * activation(scale factors x), otherwise as activation_forward. */
typedef struct mimo_masked_activation_forward_args {
  const void* x;
  const float* factors;         /* [columns of x], or null = 1 */
  const float* scale;           /* [1], or null = 1 */
  const float* row_probability; /* [rows], or null = 1 */
  void* y;                      /* [rows, width] */
  const int32_t* row_count;     /* or null */
  int64_t rows;
  int64_t width;
  int64_t interleave;
  float clamp;
  float linear_offset;
  int32_t kind;
  int32_t dtype;
} mimo_masked_activation_forward_args;
MIMO_API int32_t mimo_masked_activation_forward(mimo_stream* stream, const mimo_masked_activation_forward_args* args);

typedef struct mimo_masked_activation_backward_args {
  const void* dy;
  const void* x;
  const float* factors;         /* or null */
  const float* scale;           /* or null */
  const float* row_probability; /* or null */
  void* dx;
  float* drow_probability; /* [rows], written; or null */
  float* dfactors;         /* [columns of x], added to; or null */
  float* dscale;           /* [columns of x]: every column's part of the gradient of the scale; or null */
  const int32_t* row_count;
  int64_t rows;
  int64_t width;
  int64_t interleave;
  float clamp;
  float linear_offset;
  int32_t kind;
  int32_t dtype;
} mimo_masked_activation_backward_args;
MIMO_API int32_t mimo_masked_activation_backward(mimo_stream* stream, const mimo_masked_activation_backward_args* args);

/* Masks the router logits of experts (docs/spec/elastic.md §10); m_e = factors[e], at most 1. sigmoid = 1: y is
 * the logit whose sigmoid is m_e sigma(logit); sigmoid = 0: y = m_e logit. An expert with m_e = 0 is blocked: y = -1e30. */
typedef struct mimo_mask_scores_forward_args {
  const float* logits;      /* [T, E] */
  const float* factors;     /* [E] */
  const float* expert_bias; /* [E], or null */
  float* y;                 /* [T, E] */
  float* masked_bias;       /* [E] m_e bias where sigmoid = 1, the bias where not; blocked_bias of blocked experts; or null */
  int64_t tokens;
  int64_t experts;
  float blocked_bias;
  int32_t sigmoid;
} mimo_mask_scores_forward_args;
MIMO_API int32_t mimo_mask_scores_forward(mimo_stream* stream, const mimo_mask_scores_forward_args* args);

/* Neither the bias nor a blocked expert has a gradient. */
typedef struct mimo_mask_scores_backward_args {
  const float* dy;     /* [T, E] */
  const float* logits; /* [T, E] */
  const float* factors;
  float* dlogits;  /* [T, E], or null */
  float* dfactors; /* [E], added to; or null */
  int64_t tokens;
  int64_t experts;
  int32_t sigmoid;
} mimo_mask_scores_backward_args;
MIMO_API int32_t mimo_mask_scores_backward(mimo_stream* stream, const mimo_mask_scores_backward_args* args);

/* ---- operations: embedding and loss ------------------------------------------------------------------------- */

/* y[t] = table[ids[t] - vocabulary_start]; a foreign id gives zeros. */
typedef struct mimo_embedding_forward_args {
  const void* table; /* [vocabulary_rows, width] */
  const int32_t* ids;
  void* y;
  int64_t tokens;
  int64_t width;
  int64_t vocabulary_start;
  int64_t vocabulary_rows;
  int32_t dtype;
} mimo_embedding_forward_args;
MIMO_API int32_t mimo_embedding_forward(mimo_stream* stream, const mimo_embedding_forward_args* args);

typedef struct mimo_embedding_backward_args {
  const void* dy;
  const int32_t* ids;
  float* dtable; /* [vocabulary_rows, width] */
  int64_t tokens;
  int64_t width;
  int64_t vocabulary_start;
  int64_t vocabulary_rows;
  int32_t dtype;
} mimo_embedding_backward_args;
MIMO_API int32_t mimo_embedding_backward(mimo_stream* stream, const mimo_embedding_backward_args* args);

/* Per row of this shard of the vocabulary: maximum, Σ exp(l - maximum), and the label's logit (0 and found = 0 when
 * another shard owns it). Columns at or beyond vocabulary_live (padding) do not exist. */
typedef struct mimo_cross_entropy_statistics_args {
  const void* logits; /* [T, vocabulary_rows] */
  const int32_t* labels;
  float* maximum;      /* [T] */
  float* sum_exp;      /* [T] */
  float* target_logit; /* [T] */
  int32_t* found;      /* [T] */
  int64_t tokens;
  int64_t vocabulary_start;
  int64_t vocabulary_rows;
  int64_t vocabulary_live; /* rows of this shard that are real */
  int32_t dtype;
} mimo_cross_entropy_statistics_args;
MIMO_API int32_t mimo_cross_entropy_statistics(mimo_stream* stream, const mimo_cross_entropy_statistics_args* args);

/* Combines the statistics of `shards` vocabulary shards, [shards, T] each. lse = log Σ exp. A label that no shard owns
 * (such as -100) counts as a logit equal to the row maximum, as in Megatron. loss = lse - target + z_loss lse². */
typedef struct mimo_cross_entropy_loss_args {
  const float* maximum;
  const float* sum_exp;
  const float* target_logit;
  const int32_t* found;
  float* loss; /* [T] */
  float* lse;  /* [T] */
  int64_t tokens;
  int64_t shards;
  float z_loss;
} mimo_cross_entropy_loss_args;
MIMO_API int32_t mimo_cross_entropy_loss(mimo_stream* stream, const mimo_cross_entropy_loss_args* args);

/* dlogits = dloss[t] * ((1 + 2 z_loss lse) softmax - [v = label]); dlogits may be logits itself. Padding columns get
 * zero. round_bf16 = 1 rounds the gradient to bf16 whatever the dtype, as Megatron's fused loss does. */
typedef struct mimo_cross_entropy_backward_args {
  const void* logits;
  const int32_t* labels;
  const float* lse;
  const float* dloss; /* [T] */
  void* dlogits;
  int64_t tokens;
  int64_t vocabulary_start;
  int64_t vocabulary_rows;
  int64_t vocabulary_live;
  float z_loss;
  int32_t round_bf16;
  int32_t dtype;
} mimo_cross_entropy_backward_args;
MIMO_API int32_t mimo_cross_entropy_backward(mimo_stream* stream, const mimo_cross_entropy_backward_args* args);

/* sum[0] += Σ mask[t] x[t]; count[0] += Σ mask[t]. */
typedef struct mimo_masked_sum_args {
  const float* x;
  const float* mask; /* or null = 1 */
  double* sum;
  double* count; /* or null */
  int64_t elements;
} mimo_masked_sum_args;
MIMO_API int32_t mimo_masked_sum(mimo_stream* stream, const mimo_masked_sum_args* args);

/* Statistics of a vocabulary shard for the divergence of a student from a teacher (docs/spec/elastic.md §11). Per token, over
 * the live columns of s = student / temperature and t = teacher / temperature: max s, sum exp(s - max s), max t,
 * sum exp(t - max t), sum exp(t - max t) (t - s). */
typedef struct mimo_kl_statistics_args {
  const void* student; /* [T, vocabulary_rows] */
  const void* teacher; /* [T, vocabulary_rows] */
  float* statistics;   /* [5, T] */
  int64_t tokens;
  int64_t vocabulary_rows;
  int64_t vocabulary_live; /* columns from here on do not exist */
  float inverse_temperature;
  int32_t student_dtype;
  int32_t teacher_dtype;
} mimo_kl_statistics_args;
MIMO_API int32_t mimo_kl_statistics(mimo_stream* stream, const mimo_kl_statistics_args* args);

/* loss = sum over the vocabulary of P_t (log P_t - log P_s), from the statistics of all shards. */
typedef struct mimo_kl_loss_args {
  const float* statistics; /* [shards, 5, T] */
  float* loss;             /* [T] */
  float* student_lse;      /* [T] */
  float* teacher_lse;      /* [T] */
  int64_t tokens;
  int64_t shards;
} mimo_kl_loss_args;
MIMO_API int32_t mimo_kl_loss(mimo_stream* stream, const mimo_kl_loss_args* args);

/* dlogits = dloss (P_s - P_t) / temperature, 0 in columns that do not exist. dlogits may be the student's memory. */
typedef struct mimo_kl_backward_args {
  const void* student;
  const void* teacher;
  const float* student_lse; /* [T] */
  const float* teacher_lse; /* [T] */
  const float* dloss;       /* [T] */
  void* dlogits;            /* of the student's type */
  int64_t tokens;
  int64_t vocabulary_rows;
  int64_t vocabulary_live;
  float inverse_temperature;
  int32_t student_dtype;
  int32_t teacher_dtype;
} mimo_kl_backward_args;
MIMO_API int32_t mimo_kl_backward(mimo_stream* stream, const mimo_kl_backward_args* args);

/* ---- operations: elementwise -------------------------------------------------------------------------------- */

/* y = alpha * x + beta * y, each with its own dtype and stride: also copies, casts, scales and accumulates. An operand
 * whose factor is 0 is not read. */
typedef struct mimo_axpby_args {
  const void* x;
  void* y;
  const int32_t* row_count; /* or null */
  int64_t rows;
  int64_t width;
  int64_t x_stride;
  int64_t y_stride;
  float alpha;
  float beta;
  int32_t x_dtype;
  int32_t y_dtype;
} mimo_axpby_args;
MIMO_API int32_t mimo_axpby(mimo_stream* stream, const mimo_axpby_args* args);

/* y = a + b, fp32 sum, one rounding; contiguous; y may be a or b. */
typedef struct mimo_add_args {
  const void* a;
  const void* b;
  void* y;
  int64_t elements;
  int32_t dtype;
} mimo_add_args;
MIMO_API int32_t mimo_add(mimo_stream* stream, const mimo_add_args* args);

/* y = value. */
typedef struct mimo_fill_args {
  void* y;
  int64_t elements;
  double value;
  int32_t dtype;
} mimo_fill_args;
MIMO_API int32_t mimo_fill(mimo_stream* stream, const mimo_fill_args* args);

/* y = x * (u >= probability) / (1 - probability); u is word 0..3 of philox(seed, index / 4) with
 * index = (first_row + row) * full_width + first_column + column: the mask is the same under every layout. Backward: the same
 * operation on dy. */
typedef struct mimo_dropout_args {
  const void* x;
  void* y;
  int64_t rows;
  int64_t width;
  int64_t first_row;
  int64_t first_column;
  int64_t full_width;
  int64_t seed;
  float probability;
  int32_t dtype;
} mimo_dropout_args;
MIMO_API int32_t mimo_dropout(mimo_stream* stream, const mimo_dropout_args* args);

/* flag[0] = 1 if an element is NaN or infinite; else flag is left alone. */
typedef struct mimo_find_nonfinite_args {
  const void* x;
  int32_t* flag;
  int64_t elements;
  int32_t dtype;
} mimo_find_nonfinite_args;
MIMO_API int32_t mimo_find_nonfinite(mimo_stream* stream, const mimo_find_nonfinite_args* args);

/* ---- operations: initialisation ----------------------------------------------------------------------------- */

enum mimo_distribution {
  MIMO_DISTRIBUTION_UNIFORM = 0, /* [a, b) */
  MIMO_DISTRIBUTION_NORMAL = 1   /* mean a, standard deviation b */
};

/* Philox 4x32-10, key = seed, counter = element index in the unsharded tensor: a block of rows and columns of a
 * [.., full_width] tensor. Uniform: u = (word >> 8) 2^-24; element i takes word i mod 4 of counter i / 4; a value that
 * rounds to b becomes the float before it. Normal: Box-Muller on the pair of words (2p, 2p+1),
 * sqrt(-2 ln(1 - u_2p)) times cos(2π u_2p+1) for the even element, sin(2π u_2p+1) for the odd one. */
typedef struct mimo_philox_fill_args {
  void* y; /* [rows, width] contiguous */
  int64_t rows;
  int64_t width;
  int64_t first_row;
  int64_t first_column;
  int64_t full_width;
  int64_t seed;
  double a;
  double b;
  int32_t distribution;
  int32_t dtype;
} mimo_philox_fill_args;
MIMO_API int32_t mimo_philox_fill(mimo_stream* stream, const mimo_philox_fill_args* args);

/* ---- operations: optimizer ---------------------------------------------------------------------------------- */

/* sum[0] += Σ x², in fp64, in a fixed order. */
typedef struct mimo_sum_of_squares_args {
  const void* x;
  double* sum;
  int64_t elements;
  int32_t dtype;
} mimo_sum_of_squares_args;
MIMO_API int32_t mimo_sum_of_squares(mimo_stream* stream, const mimo_sum_of_squares_args* args);

/* count[0] += number of zeros. */
typedef struct mimo_count_zeros_args {
  const float* x;
  double* count;
  int64_t elements;
} mimo_count_zeros_args;
MIMO_API int32_t mimo_count_zeros(mimo_stream* stream, const mimo_count_zeros_args* args);

/* x *= factor[0]. */
typedef struct mimo_scale_args {
  float* x;
  const float* factor;
  int64_t elements;
} mimo_scale_args;
MIMO_API int32_t mimo_scale(mimo_stream* stream, const mimo_scale_args* args);

/* norm = sqrt(sum_of_squares); clip_factor = min(1, max_norm / (norm + 1e-6)) (1 when max_norm = 0 or the norm is NaN);
 * found_inf = 1 when the norm is not finite, else left alone. */
typedef struct mimo_clip_factor_args {
  const double* sum_of_squares;
  float* norm;
  float* clip_factor;
  float* found_inf; /* or null */
  float max_norm;
} mimo_clip_factor_args;
MIMO_API int32_t mimo_clip_factor(mimo_stream* stream, const mimo_clip_factor_args* args);

/* step[0] += 1, bias_correction1/2 = 1 - beta^step in fp64; unchanged when found_inf is not 0. */
typedef struct mimo_adam_advance_args {
  int32_t* step;
  float* bias_correction1;
  float* bias_correction2;
  const float* found_inf; /* or null */
  float beta1;
  float beta2;
} mimo_adam_advance_args;
MIMO_API int32_t mimo_adam_advance(mimo_stream* stream, const mimo_adam_advance_args* args);

/* AdamW over a flat buffer: g = gradient * clip_factor; m, v moments; u = (m/c1) / (sqrt(v/c2) + epsilon) +
 * weight_decay * weight_decay_multiplier * p; p -= learning_rate * learning_rate_multiplier * u. No value changes when
 * found_inf is not 0. All arithmetic is fp32; moments in bf16 are widened, and rounded to the nearest, ties to even, where
 * they are stored: u has those not rounded. */
typedef struct mimo_adamw_args {
  float* master;         /* fp32 parameters */
  void* model;           /* parameters as the model reads them, in model_dtype; or null when master is the model's */
  const float* gradient;
  void* exp_avg;    /* m, in exp_avg_dtype */
  void* exp_avg_sq; /* v, in exp_avg_sq_dtype */
  const float* learning_rate;
  const float* weight_decay;
  const float* clip_factor; /* or null = 1 */
  const float* bias_correction1;
  const float* bias_correction2;
  const float* found_inf; /* or null */
  int64_t elements;
  float beta1;
  float beta2;
  float epsilon;
  float weight_decay_multiplier;
  float learning_rate_multiplier;
  int32_t model_dtype;
  int32_t exp_avg_dtype;
  int32_t exp_avg_sq_dtype;
} mimo_adamw_args;
MIMO_API int32_t mimo_adamw(mimo_stream* stream, const mimo_adamw_args* args);

/* ---- images ---------------------------------------------------------------------------------------------------- */

/* Plain functions on host memory: no device, no stream; any thread may call them. Pixels are 8-bit, rows from the top,
 * channels interleaved. Files are JPEG, PNG, WebP, GIF or BMP; damaged ones end with MIMO_ERROR_DATA, kinds that Pillow
 * reads besides with MIMO_ERROR_UNSUPPORTED. Memory is bounded by the size in the header. */

/* Reads the header alone. host_header[0..3] = width, height, channels as the file has them (1 grey or palette, 2 grey
 * and alpha, 3 RGB, 4 RGBA or CMYK), kind (0 JPEG, 1 PNG, 2 WebP, 3 GIF, 4 BMP). An animation gives its first
 * picture. */
MIMO_API int32_t mimo_image_inspect(const void* host_bytes, int64_t bytes, int32_t* host_header);
/* Decodes a file to 1 (grey), 3 (RGB) or 4 (RGBA) channels, as Pillow's convert makes them; pixel_bytes = width * height *
 * channels. */
MIMO_API int32_t mimo_image_decode(const void* host_bytes, int64_t bytes, int32_t channels, void* host_pixels,
                                   int64_t pixel_bytes);
/* Decodes a file once, resizes it to each of `sizes` sizes (pairs of width and height) as Pillow resizes an image of its
 * kind — nearest with a palette or one bit, weighted by alpha, else bicubic — and makes it RGB only then; images one after
 * the other, pixel_bytes = 3 * the sum of their areas. */
MIMO_API int32_t mimo_image_decode_resized(const void* host_bytes, int64_t bytes, const int32_t* host_sizes, int32_t sizes,
                                           void* host_pixels, int64_t pixel_bytes);
/* Bicubic with antialiasing in Pillow's integer arithmetic; 4 channels are weighted by the last one meanwhile. */
MIMO_API int32_t mimo_image_resize(const void* host_from, int32_t from_width, int32_t from_height, int32_t channels,
                                   void* host_to, int32_t to_width, int32_t to_height);
/* RGB pixels to (v / 255 - mean) / deviation; host_statistics = 3 means, 3 deviations. patch = 0: planes
 * [3, height, width]; otherwise patch vectors [height / patch * width / patch, 3 * patch * patch], channel first. */
MIMO_API int32_t mimo_image_normalize(const void* host_pixels, int32_t width, int32_t height, int32_t patch,
                                      const float* host_statistics, float* host_values);

#ifdef __cplusplus
}
#endif
#endif
