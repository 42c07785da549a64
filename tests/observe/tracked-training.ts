/** What the tests of MLflow's and W&B's records train. */
import { afterEach } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Observer } from "../../src/observe/step-report.ts";
import { step } from "./step.ts";

/** Its name. */
export const training = "c0ffee".padEnd(64, "7");

/** Steps from the first to the last. */
export function train(run: Observer, first: number, last: number, loss = (at: number) => 10 - at): void {
	for (let at = first; at <= last; at++) run.step(step({ iteration: at, losses: { "lm loss": loss(at) } }));
}

/** Makes folders that are removed after each test of the file. */
export function testFolders(name: string): () => string {
	const folders: string[] = [];
	afterEach(() => {
		for (const folder of folders.splice(0)) rmSync(folder, { recursive: true });
	});
	return () => {
		const folder = mkdtempSync(join(tmpdir(), `mimo-${name}-`));
		folders.push(folder);
		return folder;
	};
}
