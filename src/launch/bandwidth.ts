/**
 * Measures how fast hosts send to each other over TCP. Every host receives bytes from senders that prove to know the
 * run's secret, and says when they have arrived; a sender finds its rate in two trials, a small one and one of about a
 * quarter of a second.
 *
 *     to the sender    CHALLENGE
 *     of the sender    {"bytes": N, "proof": HMAC of challenge, number of the trial and N}, and N bytes
 *     to the sender    "ok"
 */
import { createHmac, randomBytes, timingSafeEqual } from "node:crypto";
import { connect, createServer, type Server, type Socket } from "node:net";
import { isOwnUser, loopback } from "./rendezvous/line-connection.ts";

/** The bytes of one write. */
const block = Buffer.alloc(2 ** 18);
const trial = { least: 2 ** 21, most: 2 ** 28, seconds: 0.25 };
/** Milliseconds: for a host to answer, to receive all bytes, and for a sender to begin. */
const patience = { connect: 2000, sent: 20_000, header: 5000 };
const longestHeader = 512;
/** Largest number of connections at a time; a host sends to one other host at a time. */
const mostSenders = 64;

/** Where a host receives bytes; the first address that answers is used. */
export interface Destination {
	readonly addresses: readonly string[];
	readonly port: number;
}

/** Receives bytes of any number of senders until it is disposed. */
export class ByteSink implements Disposable {
	private constructor(
		private readonly server: Server,
		readonly port: number,
	) {}

	/** `secret` null: accepts this user's processes on this host only. */
	static open(secret: string | null): Promise<ByteSink> {
		return new Promise((resolve, reject) => {
			let senders = 0;
			const server = createServer(async (socket) => {
				socket.on("close", () => senders--);
				socket.on("error", () => {});
				senders++;
				const isOne = senders <= mostSenders && (secret !== null || (await isOwnUser(socket)));
				if (isOne) takeIn(socket, secret);
				else socket.destroy();
			});
			server.once("error", reject);
			server.listen({ host: secret === null ? loopback : "0.0.0.0", port: 0 }, () => {
				resolve(new ByteSink(server, (server.address() as { port: number }).port));
			});
		});
	}

	[Symbol.dispose](): void {
		this.server.close();
		this.server.unref();
	}
}

/** Serves the trials of one connection. */
function takeIn(socket: Socket, secret: string | null): void {
	const challenge = randomBytes(32).toString("hex");
	let trials = 0;
	let left = 0;
	let header = "";
	const late = () => socket.destroy();
	let timer = setTimeout(late, patience.header);
	socket.write(`${challenge}\n`);
	socket.on("close", () => clearTimeout(timer));
	socket.on("data", (bytes: Buffer) => {
		for (let at = 0; at < bytes.length; ) {
			if (left > 0) {
				const taken = Math.min(left, bytes.length - at);
				left -= taken;
				at += taken;
				if (left > 0) continue;
				clearTimeout(timer);
				timer = setTimeout(late, patience.header);
				socket.write("ok\n");
				continue;
			}
			const end = bytes.indexOf(10, at);
			header += bytes.toString("latin1", at, end < 0 ? Math.min(bytes.length, at + longestHeader + 1) : end);
			if (header.length > longestHeader) return late();
			if (end < 0) return;
			at = end + 1;
			left = announced(header, secret, challenge, trials++);
			header = "";
			if (left === 0) return late();
			clearTimeout(timer);
			timer = setTimeout(late, patience.sent);
		}
	});
}

/** A sender's proof that it knows the secret. */
function proofOf(secret: string | null, challenge: string, trial: number, bytes: number): string {
	return createHmac("sha256", secret ?? "")
		.update(`bandwidth\n${challenge}\n${trial}\n${bytes}`)
		.digest("hex");
}

/** The number of bytes that a header announces; 0 if its proof is wrong, or the number above the limit. */
function announced(header: string, secret: string | null, challenge: string, number: number): number {
	try {
		const { bytes, proof } = JSON.parse(header) as { bytes: unknown; proof: unknown };
		if (typeof bytes !== "number" || !(bytes > 0 && bytes <= trial.most)) return 0;
		const [expected, told] = [Buffer.from(proofOf(secret, challenge, number, bytes)), Buffer.from(String(proof))];
		return expected.length === told.length && timingSafeEqual(expected, told) ? bytes : 0;
	} catch {
		return 0;
	}
}

/** Bytes a second from this host to another. Rejects with the system's error. */
export async function measureRate({ addresses, port }: Destination, secret: string | null): Promise<number> {
	let failure: unknown = null;
	for (const address of addresses) {
		try {
			const socket = await reach(address, port);
			try {
				const challenge = await challengeOf(socket);
				const prove = (bytes: number, number: number) => proofOf(secret, challenge, number, bytes);
				const first = await send(socket, trial.least, prove(trial.least, 0));
				const bytes = Math.round((trial.seconds * trial.least) / first / block.length) * block.length;
				const chosen = Math.min(trial.most, Math.max(trial.least, bytes));
				return chosen / (await send(socket, chosen, prove(chosen, 1)));
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

/** The challenge in the other side's first line. */
function challengeOf(socket: Socket): Promise<string> {
	return new Promise((resolve, reject) => {
		const late = setTimeout(() => socket.destroy(new Error("the other side says nothing")), patience.connect);
		let text = "";
		const done = (error: Error | null) => {
			clearTimeout(late);
			socket.removeAllListeners();
			socket.on("error", () => {});
			if (error) reject(error);
			else resolve(text.trim());
		};
		socket.on("error", done);
		socket.on("close", () => done(new Error("the connection was closed")));
		socket.on("data", (bytes: Buffer) => {
			text += bytes.toString("latin1", 0, longestHeader);
			if (text.length > longestHeader) socket.destroy(new Error("the other side is not a host of this run"));
			else if (text.endsWith("\n")) done(null);
		});
	});
}

/** Sends `bytes`; seconds until the other side confirms them. */
function send(socket: Socket, bytes: number, proof: string): Promise<number> {
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
		socket.write(`${JSON.stringify({ bytes, proof })}\n`);
		more();
	});
}

/** All pairs of `count` hosts, in rounds in which each host is in at most one pair. */
export function pairsInRounds(count: number): (readonly [number, number])[][] {
	const even = count + (count % 2);
	return Array.from({ length: Math.max(0, even - 1) }, (_, round) =>
		Array.from({ length: even / 2 }, (_, i) => {
			const turn = (place: number) => (place + even - 1) % (even - 1);
			return i === 0 ? ([round, even - 1] as const) : ([turn(round + i), turn(round - i)] as const);
		}).filter(([a, b]) => a < count && b < count),
	);
}
