/** Runs the compiled program as a user does. */
import { join } from "node:path";

export const executable = join(import.meta.dir, "../../dist/mimo");

export interface Outcome {
	readonly exitCode: number;
	readonly stdout: string;
	readonly stderr: string;
}

/** Runs `dist/mimo ARGS` in `folder`, with extra environment variables. */
export function mimo(args: readonly string[], folder = ".", environment: Record<string, string> = {}): Outcome {
	const { exitCode, stdout, stderr } = Bun.spawnSync([executable, ...args], {
		cwd: folder,
		env: { ...process.env, MIMO_DEBUG: "0", ...environment },
		stdout: "pipe",
		stderr: "pipe",
	});
	return { exitCode, stdout: stdout.toString(), stderr: stderr.toString() };
}
