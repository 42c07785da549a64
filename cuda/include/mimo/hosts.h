/*
 * Runs whose ranks are on several hosts. Each host has shared memory of its own, and one of its processes relays: over TCP it
 * tells other hosts which ranks live, why the run has failed, where its ranks were then, and the identifiers by which ranks
 * meet in NCCL. Tensors between hosts move through NCCL alone.
 */
#pragma once

#include "run.h"

/* Hosts are numbered in the order of their first ranks and form a tree: host h, above 0, is connected to host
 * (h - 1) / MIMO_HOST_FAN_OUT, its parent. */
#define MIMO_HOST_FAN_OUT 32

/* As mimo_run_create, on one of several hosts and not supervised. `host_of_rank` [ranks]: the index of each rank's host, that
 * of rank 0 being 0; `own_host`: the index of this process's host. */
MIMO_API int32_t mimo_run_create_part(int32_t ranks, const int32_t* host_of_rank, int32_t own_host, int64_t timeout_ms,
                                      char* path, mimo_run** run);
/* This process relays between its host and others from now on, once a process. On a host other than 0 it first connects to the
 * parent's relay, at the numeric address `parent` and `parent_port`; MIMO_ERROR_PEER when the parent is not there, does not
 * prove that it knows `key` (32 bytes), or has not taken this host in within 15 s because of strangers' connections. On a host
 * with hosts below it listens at the numeric address `address`; `port` receives the port, or 0 without hosts below. A host that
 * does not prove that it knows `key` is turned away, and every message carries an authentication tag. The port is closed when
 * all hosts below have connected. */
MIMO_API int32_t mimo_run_relay(mimo_run* run, const uint8_t* key, const char* parent, int32_t parent_port, const char* address,
                                int32_t* port);
/* How far the ranks of the whole run were some beats ago: how many have joined, how many have finished, and the last step that
 * every rank has finished. */
MIMO_API int32_t mimo_run_outlook(mimo_run* run, int64_t* joined, int64_t* finished, int64_t* step);
/* How many messages this process has sent to other hosts and received from them. */
MIMO_API int32_t mimo_run_relayed(mimo_run* run, int64_t* sent, int64_t* received);
/* After a failure: waits until the hosts have told each other where their ranks were, at most some seconds. */
MIMO_API int32_t mimo_run_settle(mimo_run* run);
