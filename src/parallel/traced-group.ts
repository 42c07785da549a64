/** A Group whose collectives are reported to the device's tracer, if there is one, from start to completion. */
import type { Device } from "../native/device.ts";
import type { Tensor } from "../tensor/index.ts";
import type { Group, Pending } from "./group.ts";

export function tracedGroup(group: Group, device: Device): Group {
	const { name } = group;
	let sequence = 0;
	const seen = (kind: string, bytes: number, start: () => Pending): Pending => {
		const number = sequence++;
		if (device.tracer === null) return start();
		const began = performance.now();
		const pending = start();
		return {
			wait: () => {
				device.tracer?.beforeWait(device.stream);
				pending.wait();
				device.tracer?.collective({ group: name, kind, sequence: number, bytes, began });
			},
		};
	};
	/** Traces a synchronous call. */
	const whole = <Result>(kind: string, bytes: number, call: () => Result): Result => {
		let result: Result | undefined;
		seen(kind, bytes, () => {
			result = call();
			return { wait() {} };
		}).wait();
		return result!;
	};
	return {
		name,
		ranks: group.ranks,
		rank: group.rank,
		size: group.size,
		allReduce: (x, reduction) => seen("all_reduce", x.bytes, () => group.allReduce(x, reduction)),
		reduceScatter: (x, y) => seen("reduce_scatter", x.bytes, () => group.reduceScatter(x, y)),
		allGather: (x, y) => seen("all_gather", y.bytes, () => group.allGather(x, y)),
		broadcast: (x, root) => seen("broadcast", x.bytes, () => group.broadcast(x, root)),
		allToAll: (send, sendRows, receive, receiveRows) =>
			seen("all_to_all", send.bytes, () => group.allToAll(send, sendRows, receive, receiveRows)),
		exchangeRows: (send, receive, ranges, stage) =>
			seen("exchange_rows", send.rows.bytes + (send.beside?.bytes ?? 0), () =>
				group.exchangeRows(send, receive, ranges, stage),
			),
		rowTransport: () => group.rowTransport(),
		send: (x: Tensor, to) => seen("send", x.bytes, () => group.send(x, to)),
		receive: (x: Tensor, from) => seen("receive", x.bytes, () => group.receive(x, from)),
		barrier: () => whole("barrier", 0, () => group.barrier()),
		exchange: (values) => whole("exchange", values.byteLength, () => group.exchange(values)),
		contribute: (values) => whole("exchange", values.byteLength, () => group.contribute(values)),
	};
}
