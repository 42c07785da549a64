/* Runs: memory that the ranks of one host share. */
#pragma once

#include "library.h"

/* Texts of fixed length, each with its zero. */
#define MIMO_RUN_PATH_BYTES 64
#define MIMO_HOST_BYTES 64
#define MIMO_MODULE_BYTES 32
#define MIMO_COORDINATES_BYTES 64
#define MIMO_SENTENCE_BYTES 512

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
