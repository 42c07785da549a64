/** Generated from cuda/include/mimo/exchange_rows.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const RowStage = { sender: 0, receiver: 1 } as const;
export type RowStageName = keyof typeof RowStage;
export const RowTransport = { host: 0, peers: 1, counts: 2 } as const;
export type RowTransportName = keyof typeof RowTransport;

export const structs = {
	row_exchange: {
		x: "ptr",
		y: "ptr",
		beside_x: "ptr",
		beside_y: "ptr",
		send_ranges: "ptr",
		receive_ranges: "ptr",
		ranges: "i64",
		row_bytes: "i64",
		beside_row_bytes: "i64",
		x_rows: "i64",
		y_rows: "i64",
		stage_rows: "i64",
		stage: "i32",
	},
} as const;

export const functions = {
	mimo_group_exchange_rows: { args: ["ptr", "ptr", "ptr", "ptr", "ptr"], returns: "i32" },
	mimo_group_row_transport: { args: ["ptr", "ptr", "ptr"], returns: "i32" },
} as const;
