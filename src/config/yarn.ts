/** YaRN's keys in descriptions of models, which may lack them. */
import type { Field } from "./field.ts";
import { yarnKeys } from "./keys/model.ts";
import { type CamelCase, camelCase } from "./names.ts";
import type { TrainingConfiguration } from "./schema.ts";

export type YarnValues = Pick<TrainingConfiguration, CamelCase<keyof typeof yarnKeys>>;

/** The description's values; absent ones are the defaults. */
export function yarnOf(description: Partial<YarnValues>): YarnValues {
	const standing = Object.entries(yarnKeys).map(([key, field]) => [camelCase(key), (field as Field).default]);
	return { ...(Object.fromEntries(standing) as YarnValues), ...description };
}
