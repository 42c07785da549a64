/**
 * Decodes a file on four threads at once, several times each, within a bound of memory: `bun decode-together.ts FILE BOUND`. Prints
 * the growth of the process's peak of memory in bytes, and the digests of what the threads decoded.
 */
import { readFileSync } from "node:fs";
import { Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";

declare const self: Worker;

const threads = 4;
const times = 2;

interface Job {
	readonly file: string;
	readonly bound: number;
}

async function measure(job: Job): Promise<void> {
	const peak = () => Number(/VmHWM:\s+(\d+)/.exec(readFileSync("/proc/self/status", "utf8"))![1]) * 1024;
	const workers = Array.from({ length: threads }, () => new Worker(import.meta.url));
	/** The answers of all threads to a message. */
	const ask = (message: unknown) =>
		Promise.all(
			workers.map((worker) => {
				const { promise, resolve } = Promise.withResolvers<string>();
				worker.onmessage = ({ data }: MessageEvent<string>) => resolve(data);
				worker.postMessage(message);
				return promise;
			}),
		);
	await ask(job);
	const before = peak();
	const digests = await ask("decode");
	console.log(JSON.stringify({ bytes: peak() - before, digests: [...new Set(digests)] }));
	process.exit(0);
}

function serve(): void {
	let images: Images;
	let bytes: Uint8Array;
	self.onmessage = async ({ data }: MessageEvent<"decode" | Job>) => {
		if (data !== "decode") {
			images = new Images(await openLibrary("cpu"));
			images.boundMemory(data.bound);
			bytes = readFileSync(data.file);
			postMessage("open");
			return;
		}
		const found = Array.from({ length: times }, () => {
			const [image] = images.decodeResized(bytes, [{ width: 56, height: 56 }], "energon");
			return Bun.hash(image!.pixels).toString();
		});
		postMessage([...new Set(found)].join());
	};
}

if (Bun.isMainThread) await measure({ file: process.argv[2]!, bound: Number(process.argv[3]) });
else serve();
