/**
 * An S3 server (moto), or a plain HTTP server, and a gate in front of it, through which a program reaches it and which makes one request
 * after another go wrong. As S3 does and moto does not, the gate refuses a body whose SHA-256 is not the signed one.
 */
import { createHash } from "node:crypto";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";

export const causes = [
	...([
		"cut before",
		"cut within the body",
		"cut after",
		"truncated",
		"silent",
		"slow",
		"500",
		"503 four times",
	] as const),
	...(["403", "403 for good", "404 of a part", "wrong bytes sent", "wrong bytes received"] as const),
] as const;
export type Cause = (typeof causes)[number];

interface Fault {
	readonly cause: Cause;
	/** Requests that pass before it. */
	skip: number;
	/** Times that it has happened. */
	happened: number;
}

const times: Partial<Record<Cause, number>> = { "503 four times": 4, "403 for good": Number.POSITIVE_INFINITY };

export class StoreServer implements AsyncDisposable {
	#fault: Fault | null = null;
	requests = 0;
	/** Heads of all requests. */
	readonly seen: string[] = [];
	/** Called with the head of every request before it goes on. */
	watch: ((head: string) => void) | null = null;

	private constructor(
		private readonly stop: () => Promise<unknown>,
		/** Of the server itself. */
		readonly direct: string,
		private readonly gate: Server,
	) {
		gate.on("request", (request, response) => void this.#pass(request, response).catch(() => response.destroy()));
	}

	static async start(python: string): Promise<StoreServer> {
		const moto = Bun.spawn([python, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], {
			env: { ...process.env, S3_UPLOAD_PART_MIN_SIZE: "1024", NO_COLOR: "1" },
			stdout: "ignore",
			stderr: "pipe",
		});
		const reader = moto.stderr.getReader();
		let said = "";
		let direct: string | undefined;
		while (direct === undefined) {
			const { value, done } = await reader.read();
			if (done) throw new Error(`moto ended: ${said}`);
			said += new TextDecoder().decode(value);
			[direct] = /http:\/\/127\.0\.0\.1:\d+/.exec(said) ?? [];
		}
		// Its log of requests must not fill the pipe.
		void (async () => {
			while (!(await reader.read()).done) {}
		})();
		await fetch(`${direct}/bucket`, { method: "PUT" });
		return await StoreServer.before(direct, async () => {
			moto.kill();
			await moto.exited;
		});
	}

	/** A gate before the server of an address. */
	static async before(direct: string, stop: () => Promise<unknown>): Promise<StoreServer> {
		const gate = createServer();
		await new Promise<void>((resolve) => gate.listen(0, "127.0.0.1", resolve));
		return new StoreServer(stop, direct, gate);
	}

	get endpoint(): string {
		return `http://127.0.0.1:${(this.gate.address() as AddressInfo).port}`;
	}

	/** The variables of a program that reaches the store through the gate. */
	get environment(): Record<string, string> {
		return { AWS_ENDPOINT_URL: this.endpoint, AWS_ACCESS_KEY_ID: "the-key", AWS_SECRET_ACCESS_KEY: "the-secret" };
	}

	/** After `skip` requests that it could hit, one (or several) go wrong. */
	arm(cause: Cause, skip: number): void {
		this.#fault = { cause, skip, happened: 0 };
	}

	/** Lets everything pass; how often the fault has happened. */
	disarm(): number {
		const happened = this.#fault?.happened ?? 0;
		this.#fault = null;
		return happened;
	}

	#faultOf(request: IncomingMessage, body: Uint8Array): Cause | null {
		const fault = this.#fault;
		if (fault === null) return null;
		const { cause } = fault;
		if (cause === "wrong bytes sent" && (body.length === 0 || request.method !== "PUT")) return null;
		const reads = request.method === "GET" && !request.url!.includes("?");
		if ((cause === "wrong bytes received" || cause === "cut within the body" || cause === "truncated") && !reads)
			return null;
		if (cause === "404 of a part" && !request.url!.includes("partNumber=")) return null;
		if (fault.skip-- > 0) return null;
		if (fault.happened >= (times[cause] ?? 1)) return null;
		fault.happened++;
		return cause;
	}

	async #pass(request: IncomingMessage, response: ServerResponse): Promise<void> {
		this.requests++;
		this.seen.push(`${request.method} ${request.url} ${JSON.stringify(request.headers)}`);
		this.watch?.(this.seen.at(-1)!);
		const pieces: Uint8Array[] = [];
		for await (const piece of request) pieces.push(piece);
		let body = Buffer.concat(pieces);
		const fault = this.#faultOf(request, body);
		const refuse = (status: number, code: string) =>
			response.writeHead(status).end(`<?xml version="1.0"?><Error><Code>${code}</Code><Message>no</Message></Error>`);
		switch (fault) {
			case "cut before":
				request.socket.destroy();
				return;
			case "silent":
				return;
			case "500":
				return void refuse(500, "InternalError");
			case "503 four times":
				return void refuse(503, "SlowDown");
			case "403":
			case "403 for good":
				return void refuse(403, "AccessDenied");
			case "404 of a part":
				return void refuse(404, "NoSuchUpload");
			case "wrong bytes sent":
				body = Buffer.from(body);
				body[Math.floor(body.length / 2)]! ^= 1;
		}
		const digest = request.headers["x-amz-content-sha256"];
		if (digest !== undefined && createHash("sha256").update(body).digest("hex") !== digest) {
			return void refuse(400, "XAmzContentSHA256Mismatch");
		}
		const { host: _, connection: __, "content-length": ___, ...headers } = request.headers;
		const answer = await fetch(this.direct + request.url, {
			method: request.method!,
			headers: headers as Record<string, string>,
			decompress: false,
			...(body.length > 0 ? { body } : {}),
		});
		let bytes = Buffer.from(await answer.arrayBuffer());
		const kept = Object.fromEntries(
			[...answer.headers].filter(([name]) => !/^(connection|content-length|transfer-encoding)$/.test(name)),
		);
		if (fault === "cut after") {
			request.socket.destroy();
			return;
		}
		if (fault === "wrong bytes received" && bytes.length > 0) {
			bytes = Buffer.from(bytes);
			bytes[Math.floor(bytes.length / 2)]! ^= 1;
		}
		if (fault === "truncated") bytes = bytes.subarray(0, Math.floor(bytes.length / 2));
		if (request.method === "HEAD") {
			const length = answer.headers.get("content-length");
			response.writeHead(answer.status, { ...kept, ...(length === null ? {} : { "content-length": length }) }).end();
			return;
		}
		response.writeHead(answer.status, answer.status === 204 ? kept : { ...kept, "content-length": bytes.length });
		if (fault === "cut within the body") {
			response.write(bytes.subarray(0, Math.floor(bytes.length / 2)));
			await Bun.sleep(5);
			request.socket.destroy();
			return;
		}
		if (fault === "slow") {
			response.flushHeaders();
			for (let at = 0; at < bytes.length; at += Math.ceil(bytes.length / 8)) {
				await Bun.sleep(10);
				response.write(bytes.subarray(at, at + Math.ceil(bytes.length / 8)));
			}
			response.end();
			return;
		}
		response.end(bytes);
	}

	async [Symbol.asyncDispose](): Promise<void> {
		this.gate.closeAllConnections();
		this.gate.close();
		await this.stop();
	}
}
