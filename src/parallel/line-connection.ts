/** JSON values over TCP, one a line, with limits on size and time. */
import { connect, createServer, type Server, type Socket } from "node:net";

/** A line of a stranger must not fill the memory. */
const longestLine = 1 << 20;

export class LineConnection implements Disposable {
	#rest = "";
	readonly #lines: string[] = [];
	#closed = false;
	#wake: (() => void) | null = null;

	constructor(
		private readonly socket: Socket,
		readonly from: string,
	) {
		socket.setNoDelay(true);
		socket.setEncoding("utf8");
		socket.on("data", (text: string) => this.#take(text));
		socket.on("close", () => this.#close());
		// "close" follows.
		socket.on("error", () => {});
	}

	/** The other side's, numeric; "" when the connection is gone. */
	get address(): string {
		return this.socket.remoteAddress ?? "";
	}

	get closed(): boolean {
		return this.#closed;
	}

	/** Fails with the system's error code. */
	static open(address: string, port: number, milliseconds: number): Promise<LineConnection> {
		return new Promise((resolve, reject) => {
			const socket = connect({ host: address, port });
			const late = setTimeout(() => {
				socket.destroy();
				reject(Object.assign(new Error("No answer."), { code: "ETIMEDOUT" }));
			}, milliseconds);
			socket.once("error", (error) => {
				clearTimeout(late);
				reject(error);
			});
			socket.once("connect", () => {
				clearTimeout(late);
				resolve(new LineConnection(socket, `${address}:${port}`));
			});
		});
	}

	send(value: unknown): void {
		if (!this.#closed) this.socket.write(`${JSON.stringify(value)}\n`);
	}

	/** The next value; undefined when nothing legible came in time or the other side has closed. */
	async receive(milliseconds: number): Promise<unknown> {
		const end = performance.now() + milliseconds;
		while (this.#lines.length === 0 && !this.#closed) {
			const left = end - performance.now();
			if (left <= 0) return undefined;
			await new Promise<void>((resolve) => {
				const timer = setTimeout(resolve, left);
				this.#wake = () => {
					clearTimeout(timer);
					resolve();
				};
			});
		}
		const line = this.#lines.shift();
		if (line === undefined) return undefined;
		try {
			return JSON.parse(line);
		} catch {
			return undefined;
		}
	}

	/** Resolves when the other side has gone. */
	async ended(): Promise<void> {
		if (!this.#closed) await new Promise<void>((resolve) => this.socket.once("close", () => resolve()));
	}

	/** What was sent still arrives. */
	[Symbol.dispose](): void {
		if (this.#closed) return;
		this.socket.end();
		this.socket.unref();
		// One that does not close its side is left after a moment.
		setTimeout(() => this.socket.destroy(), 1000).unref();
	}

	#take(text: string): void {
		this.#rest += text;
		const lines = this.#rest.split("\n");
		this.#rest = lines.pop()!;
		this.#lines.push(...lines);
		if (this.#rest.length > longestLine) this.socket.destroy();
		this.#wake?.();
	}

	#close(): void {
		this.#closed = true;
		this.#wake?.();
	}
}

/** Listens at an address; port 0: any that is free. Fails with the system's error code. */
export function listen(
	address: string,
	port: number,
	accept: (connection: LineConnection) => void,
): Promise<{ readonly port: number; readonly server: Server }> {
	return new Promise((resolve, reject) => {
		const server = createServer((socket) => accept(new LineConnection(socket, String(socket.remoteAddress))));
		server.once("error", reject);
		server.listen({ host: address, port, exclusive: true }, () => {
			const bound = server.address();
			resolve({ port: typeof bound === "object" && bound !== null ? bound.port : port, server });
		});
	});
}
