/** Entry point of a data thread: runs some of a rank's logical workers and sends their events to the loader. */

import { Images } from "../../../native/images.ts";
import { openLibrary } from "../../../native/library.ts";
import { UserError } from "../../../system/errors.ts";
import { showReads } from "../../../system/read-watch.ts";
import { SampleError } from "../errors.ts";
import { openStorage } from "../storage/open.ts";
import { Pipelines } from "./configuration.ts";
import { EventStream } from "./events.ts";
import type { FromThread, ToThread } from "./messages.ts";
import { raising, reporting } from "./skipped.ts";
import { checkSettings, decodePosition, encodePosition } from "./state.ts";
import { byteLength, detach, transferable } from "./transfer.ts";

declare const self: Worker;

const streams = new Map<number, EventStream>();

function send(message: FromThread, transfer: ArrayBuffer[] = []): void {
	postMessage(message, transfer);
}

async function open(message: Extract<ToThread, { type: "open" }>): Promise<void> {
	const { configuration, workers, onFailure } = message;
	showReads(message.watch);
	const images = new Images(await openLibrary("cpu"));
	images.boundMemory(message.decodingBytes);
	const remark = (sentence: string) => send({ type: "remark", sentence });
	const pipelines = new Pipelines(configuration, openStorage(message.storage), images, remark);
	const settings = pipelines.settings();
	if (message.saved !== null) checkSettings(message.saved, settings);
	let length = 0;
	for (const { number, rank, id, position, skip } of workers) {
		const report = reporting({ rank, worker: id }, (skipped) => send({ type: "skipped", skipped }));
		const stream = pipelines.stream(rank, id, onFailure === "skip" ? report : raising(report));
		length = stream.dataset.lengthOfRank();
		streams.set(number, new EventStream(stream, position === null ? null : decodePosition(position), skip));
	}
	send({ type: "opened", settings, length });
}

function answer(message: ToThread): void {
	if (message.type === "open") return;
	const stream = streams.get(message.worker)!;
	if (message.type === "position") {
		const position = encodePosition(stream.position(message.event));
		send({ type: "position", request: message.request, position });
		return;
	}
	stream.forget(message.needed);
	const item = stream.next();
	const detached = detach(item);
	const transfer = new Set(transferable(item));
	if (detached) transfer.add(detached);
	send({ type: "event", worker: message.worker, item, bytes: item === null ? 0 : byteLength(item) }, [...transfer]);
}

function fail(error: unknown): void {
	const { message, stack = "" } = error instanceof Error ? error : new Error(String(error));
	// The message of a SampleError names the sample.
	const isUserError = error instanceof UserError || error instanceof SampleError;
	send({ type: "failed", sentence: message, isUserError, stack });
}

self.onmessage = async ({ data }: MessageEvent<ToThread>) => {
	try {
		if (data.type === "open") await open(data);
		else answer(data);
	} catch (error) {
		fail(error);
	}
};
