/** Generated from cuda/include/mimo/stream.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const structs = {
	graph_statistics: { graphs: "i64", launches: "i64", operations_in_graphs: "i64", operations_alone: "i64" },
} as const;

export const functions = {
	mimo_stream_create: { args: ["ptr", "i32", "ptr"], returns: "i32" },
	mimo_stream_destroy: { args: ["ptr"], returns: "i32" },
	mimo_stream_synchronize: { args: ["ptr"], returns: "i32" },
	mimo_stream_set_graphs: { args: ["ptr", "i32"], returns: "i32" },
	mimo_stream_graph_statistics: { args: ["ptr", "ptr"], returns: "i32" },
	mimo_event_create: { args: ["ptr", "ptr"], returns: "i32" },
	mimo_event_destroy: { args: ["ptr"], returns: "i32" },
	mimo_event_record: { args: ["ptr", "ptr"], returns: "i32" },
	mimo_stream_wait_event: { args: ["ptr", "ptr"], returns: "i32" },
	mimo_event_synchronize: { args: ["ptr"], returns: "i32" },
	mimo_event_elapsed: { args: ["ptr", "ptr", "ptr"], returns: "i32" },
} as const;
