/*
 * Runs. The ranks of a host share memory with the state of each rank, its latest collectives, and the memory of groups. Through it
 * every rank detects that another rank has died or hangs, and the run ends with a diagnosis.
 */
#pragma once

#include "library.h"

/* Lengths of texts in bytes, with the zero at the end. */
#define MIMO_RUN_PATH_BYTES 64
#define MIMO_HOST_BYTES 64
#define MIMO_MODULE_BYTES 32
#define MIMO_COORDINATES_BYTES 64
#define MIMO_SENTENCE_BYTES 512

/* A run in this process. Its memory is an unnamed file in /dev/shm, which disappears with the last process that has it open,
 * however that process ends. */
typedef struct mimo_run mimo_run;

enum mimo_rank_phase {
  MIMO_RANK_PHASE_ABSENT = 0, /* has not joined */
  MIMO_RANK_PHASE_RUNNING = 1,
  MIMO_RANK_PHASE_FINISHED = 2,
  MIMO_RANK_PHASE_FAILED = 3
};

/* Kinds of calls of the flight recorder: the functions mimo_group_*. */
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
  char error[MIMO_SENTENCE_BYTES];          /* the sentence that the rank failed with, or "" */
  int64_t phase;                            /* MIMO_RANK_PHASE_* */
  int64_t pid;                              /* of its process; 0: not known yet */
  int64_t heartbeat;                        /* beats so far */
  int64_t progress;                         /* finished collectives and steps */
  int64_t progress_time;                    /* when `progress` last rose */
  int64_t step;                             /* the last finished step */
  int64_t calls;                            /* collectives started so far */
  int64_t waiting_call;                     /* number of the call that its training thread waits for, or -1 */
} mimo_rank_state;

/* A collective call of a rank: an entry of the flight recorder. */
typedef struct mimo_call_record {
  char group[64];
  int64_t call;          /* number of the call among those of the rank, from 0 */
  int64_t sequence;      /* number among the group's collectives; of a message, among those of its pair and direction */
  int64_t kind;          /* MIMO_COLLECTIVE_* */
  int64_t bytes;         /* size of x, or of a row where the call moves rows */
  int64_t state;         /* MIMO_CALL_STATE_* */
  int64_t started;       /* nanoseconds of the host's monotonic clock */
  int64_t finished;      /* as `started`; 0: not finished */
  int64_t missing_count; /* of a failed call: how many members' parts were missing */
  int64_t missing[16];   /* global ranks of the first of those members */
} mimo_call_record;

/* Makes the shared memory of a run whose ranks are all on this host. `path` [MIMO_RUN_PATH_BYTES] receives the path by which other
 * processes of the host open it while this process lives. `timeout_ms`: the run fails when no rank makes progress for longer.
 * `supervised` 1: this process is a launcher that calls mimo_run_watch, and ranks fail each other only when it has not called it
 * for 5 s; 0: ranks fail each other. */
MIMO_API int32_t mimo_run_create(int32_t ranks, int32_t supervised, int64_t timeout_ms, char* path, mimo_run** run);
MIMO_API int32_t mimo_run_open(const char* path, mimo_run** run);
/* After its groups are destroyed. */
MIMO_API int32_t mimo_run_close(mimo_run* run);
/* This process is `rank` from now on; once per process. A heartbeat thread shows that it is alive and checks the other ranks until
 * mimo_run_close. If this process has not ended 3 s after a failure, the heartbeat thread calls mimo_run_conclude and ends the
 * process with `exit_code`. MIMO_ERROR_PEER: the run has failed, or another process is that rank. */
MIMO_API int32_t mimo_run_join(mimo_run* run, int32_t rank, int32_t exit_code);
/* Sets the names of `rank` in diagnoses, such as "language" and "tp 0 dp 1". */
MIMO_API int32_t mimo_run_describe(mimo_run* run, int32_t rank, const char* module, const char* coordinates);
/* This process's rank has finished step `step`. */
MIMO_API int32_t mimo_run_progress(mimo_run* run, int64_t step);
/* This process's rank has done all its work: its end is no failure. */
MIMO_API int32_t mimo_run_leave(mimo_run* run);
/* Fails the run: every wait of every rank returns MIMO_ERROR_PEER. The first failure is the run's; a later one is only kept as
 * the error of its rank. `rank` -1: no rank is to blame. */
MIMO_API int32_t mimo_run_fail(mimo_run* run, int32_t rank, const char* sentence);
/* Called by the launcher: process `pid` will be `rank`, so that mimo_run_watch detects its end before it joins. */
MIMO_API int32_t mimo_run_expect(mimo_run* run, int32_t rank, int32_t pid);
/* To be called by a launcher a few times a second: checks every rank, and fails the run when a rank has died, was stopped or
 * silent for 5 s, has not joined within 60 s, or makes no progress. In a process that has joined it only reports, since the
 * heartbeat thread checks the ranks. `failed`: 1 when the run has failed; `rank` then receives the rank to blame or -1, and
 * `reason` [MIMO_SENTENCE_BYTES] the sentence. */
MIMO_API int32_t mimo_run_watch(mimo_run* run, int32_t* failed, int32_t* rank, char* reason);
/* claimed: 1 for the first call in all processes, whose process is to print the diagnosis; 0 for others. */
MIMO_API int32_t mimo_run_claim_diagnosis(mimo_run* run, int32_t* claimed);
/* The diagnosis of a failed run: why it failed, and a line for every other rank; of more than 64 ranks those in the same state
 * share a line. Cut to `capacity` bytes, with the zero. */
MIMO_API int32_t mimo_run_diagnose(mimo_run* run, char* text, int64_t capacity);
/* file: the descriptor that this process prints a diagnosis to, instead of standard error. */
MIMO_API int32_t mimo_run_print_to(mimo_run* run, int32_t file);
/* To be called by a rank's process, joined or not, before it ends with `exit_code` because the run has failed. Returns when the
 * diagnosis has been printed, or after some seconds. This process prints it, to standard error or the descriptor of
 * mimo_run_print_to, if no living launcher and no other rank does. Then it kills a failed rank of this host whose heartbeat has
 * stopped. */
MIMO_API int32_t mimo_run_conclude(mimo_run* run, int32_t exit_code);
/* From now on the heartbeat thread of this process's rank writes a recording to the file `path` at every beat: the rank's state,
 * its latest calls and the run's failure. It is left when every process of the run is killed; mimo_run_leave removes it. */
MIMO_API int32_t mimo_run_record(mimo_run* run, const char* path);
/* Writes a recording of any rank to the file `path`, once: for a launcher whose run has failed. */
MIMO_API int32_t mimo_run_record_rank(mimo_run* run, int32_t rank, const char* path);
/* Makes a failed run from `count` recordings, whose paths lie one after the other in `paths`, each with its zero.
 * mimo_run_rank_state, mimo_run_calls and mimo_run_diagnose work on it; `ranks` receives how many ranks it had. Its failure is
 * the recorded one, or that of the rank that stopped recording first. MIMO_ERROR_DATA: a file is no recording of this run. */
MIMO_API int32_t mimo_run_read_recordings(const char* paths, int32_t count, int32_t* ranks, mimo_run** run);
MIMO_API int32_t mimo_run_rank_state(mimo_run* run, int32_t rank, mimo_rank_state* state);
/* records [capacity] receives the latest calls of a rank, newest first, as far as they are still recorded; count: how many. */
MIMO_API int32_t mimo_run_calls(mimo_run* run, int32_t rank, mimo_call_record* records, int32_t capacity,
                                int32_t* count);
/* From now on the system sends `signal` to this process when its parent, the process `parent`, ends. If `parent` has ended
 * already, this process ends now with `exit_code`. */
MIMO_API int32_t mimo_end_with_parent(int32_t parent, int32_t signal, int32_t exit_code);
