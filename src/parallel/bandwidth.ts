/**
 * How fast hosts send to each other over TCP. Every host takes in bytes of whoever knows the run's secret and says when it has
 * them; one that sends finds its rate in two trials, a small one and one of about a quarter of a second.
 */
import { connect, createServer, type Server, type Socket } from "node:net";

/** Sent at once. */
const block = Buffer.alloc(2 ** 18);
const trial = { least: 2 ** 21, most: 2 ** 28, seconds: 0.25 };
/** Milliseconds: until a host answers, and until it has what it was sent. */
const patience = { connect: 2000, sent: 20_000 };
const longestHeader = 4096;

/** Where a host takes in bytes; the first address that answers is taken. */
export interface Destination {
	readonly addresses: readonly string[];
	readonly port: number;
}

/** Takes in bytes until it is disposed. */
export class ByteSink implements Disposable {
	private constructor(
		private readonly server: Server,
		readonly port: number,
	) {}

	static open(secret: string): Promise<ByteSink> {
		return new Promise((resolve, reject) => {
			const server = createServer((socket) => takeIn(socket, secret));
			server.once("error", reject);
			server.listen({ host: "0.0.0.0", port: 0 }, () => {
				resolve(new ByteSink(server, (server.address() as { port: number }).port));
			});
		});
	}

	[Symbol.dispose](): void {
		this.server.close();
		this.server.unref();
	}
}

/** Trials of a connection: a line with the secret and a number of bytes, the bytes, and our answer. */
function takeIn(socket: Socket, secret: string): void {
	let left = 0;
	let header = "";
	socket.on("error", () => {});
	socket.on("data", (bytes: Buffer) => {
		for (let at = 0; at < bytes.length; ) {
			if (left > 0) {
				const taken = Math.min(left, bytes.length - at);
				left -= taken;
				at += taken;
				if (left === 0) socket.write("ok\n");
				continue;
			}
			const end = bytes.indexOf(10, at);
			header += bytes.toString("latin1", at, end < 0 ? bytes.length : end);
			if (header.length > longestHeader) socket.destroy();
			if (end < 0) return;
			at = end + 1;
			left = announced(header, secret);
			header = "";
			if (left === 0) {
				socket.destroy();
				return;
			}
		}
	});
}

/** 0: not from one of us. */
function announced(header: string, secret: string): number {
	try {
		const { secret: told, bytes } = JSON.parse(header) as { secret: unknown; bytes: unknown };
		return told === secret && Number.isSafeInteger(bytes) ? Math.max(0, bytes as number) : 0;
	} catch {
		return 0;
	}
}

/** Bytes a second from this host to another. Fails with the system's words. */
export async function measureRate({ addresses, port }: Destination, secret: string): Promise<number> {
	let failure: unknown = null;
	for (const address of addresses) {
		try {
			const socket = await reach(address, port);
			try {
				const first = await send(socket, trial.least, secret);
				const bytes = Math.round((trial.seconds * trial.least) / first / block.length) * block.length;
				const chosen = Math.min(trial.most, Math.max(trial.least, bytes));
				return chosen / (await send(socket, chosen, secret));
			} finally {
				socket.destroy();
			}
		} catch (error) {
			failure = error;
		}
	}
	throw failure;
}

function reach(host: string, port: number): Promise<Socket> {
	return new Promise((resolve, reject) => {
		const socket = connect({ host, port });
		const late = setTimeout(() => socket.destroy(new Error(`${host} does not answer`)), patience.connect);
		socket.once("error", (error) => {
			clearTimeout(late);
			reject(error);
		});
		socket.once("connect", () => {
			clearTimeout(late);
			socket.setNoDelay(true);
			resolve(socket);
		});
	});
}

/** Seconds until the other side has `bytes`. */
function send(socket: Socket, bytes: number, secret: string): Promise<number> {
	return new Promise((resolve, reject) => {
		const began = performance.now();
		const late = setTimeout(() => done(new Error(`${bytes} bytes took longer than 20 s`)), patience.sent);
		const done = (error: Error | null) => {
			clearTimeout(late);
			socket.removeAllListeners();
			socket.on("error", () => {});
			if (error) reject(error);
			else resolve((performance.now() - began) / 1000);
		};
		socket.on("error", done);
		socket.on("close", () => done(new Error("the connection was closed")));
		socket.on("data", () => done(null));
		let left = bytes;
		const more = () => {
			while (left > 0) {
				const part = block.subarray(0, Math.min(left, block.length));
				left -= part.length;
				if (!socket.write(part)) {
					socket.once("drain", more);
					return;
				}
			}
		};
		socket.write(`${JSON.stringify({ secret, bytes })}\n`);
		more();
	});
}

/** Every pair of `count` once, in rounds in which nobody is in two pairs. */
export function pairsInRounds(count: number): (readonly [number, number])[][] {
	const even = count + (count % 2);
	return Array.from({ length: Math.max(0, even - 1) }, (_, round) =>
		Array.from({ length: even / 2 }, (_, i) => {
			const turn = (place: number) => (place + even - 1) % (even - 1);
			return i === 0 ? ([round, even - 1] as const) : ([turn(round + i), turn(round - i)] as const);
		}).filter(([a, b]) => a < count && b < count),
	);
}
