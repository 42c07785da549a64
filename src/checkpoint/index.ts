/** The part of this folder that others use; they import nothing else of it, but for modules that are loaded when they are asked for. */
export {
	type ConversionOptions,
	openSource,
	openWeights,
	type PlannedConversion,
	planConversion,
} from "./conversion/convert.ts";
export { adaptedModel, keptInSource, spellingObject, type TargetName } from "./conversion/hugging-face.ts";
export {
	damages,
	formatBytes,
	formatInspection,
	formatPlanLine,
	inspectCheckpoint,
	planLines,
	requireEqual,
} from "./conversion/inspect.ts";
export { layerNameKinds } from "./conversion/layouts.ts";
export {
	detectFormat,
	formats,
	type JsonObject,
	type NewLayerOptions,
	requireFormat,
	type SourceCheckpoint,
	type SourceOptions,
} from "./conversion/source.ts";
export { type DtypeTag, decodeFloats, isDtypeTag, isFloatDtype, type TensorArray } from "./dtype.ts";
export { writeFileAtomically } from "./files.ts";
export {
	ownershipFile,
	ownershipText,
} from "./folders.ts";
export { GatheredTensors, shareOf } from "./gathered-tensors.ts";
export { type Companions, tokenizerOf, withoutTokenizer } from "./hf/companions.ts";
export type { LanguageModelConfiguration } from "./hf/families/family.ts";
export {
	configurationFromHuggingFace,
	configurationToHuggingFace,
	detectSpelling,
	familyOf,
	languageCorrespondence,
} from "./hf/families/index.ts";
export { type SpellingName, spellings } from "./hf/families/nemotron-h-names.ts";
export { defaultShardBytes, HuggingFaceFolder } from "./hf/folder.ts";
export { isInHub } from "./hf/hub.ts";
export { folderTexts, lackingOfImages, readImageProcessor } from "./hf/image-processor.ts";
export { formatPythonJson, parseKeepingFloats, parsePythonJson } from "./hf/json.ts";
export { configObject, isKeptObject, type KeptFolder, objectsOf } from "./hf/kept-folder.ts";
export { readModelKeys } from "./hf/model-keys.ts";
export {
	describeParts,
	type FolderParts,
	type HuggingFaceModel,
	languageKey,
	languageType,
	namesOf,
	openHuggingFaceModel,
	openParts,
} from "./hf/parts.ts";
export { keptOf, openPretrained, type Pretrained } from "./hf/pretrained.ts";
export { affineName, detectProjector, type ProjectorSizes, projectorPrefix } from "./hf/projector-names.ts";
export { detectTower, towerPrefix } from "./hf/vision-names.ts";
export { isTowerType } from "./hf/vision-towers.ts";
export { planFolder } from "./hf/written-folder.ts";
export { adaptersOf, mergeAdapters, scaleOf, withoutAdapters } from "./lora/adapters.ts";
export { openPeftFolder, type PeftAdapters, planPeftFolder } from "./lora/peft-folder.ts";
export { type AdaptedModel, moduleSpelling, peftCorrespondence, storedSpelling } from "./lora/peft-names.ts";
export { type Correspondence, CorrespondenceBuilder, MappedStore, planTensors, requireMatch } from "./mapping.ts";
export {
	copyBlocks,
	firstCopyCounts,
	gatherTensors,
	gradientsOf,
	loadModel,
	type NamedTensors,
	ValueStore,
} from "./model-store.ts";
export { canonicalLayout, type Json, type Manifest, type NativeLayout } from "./native/manifest.ts";
export { isCheckpoint, NativeCheckpoint } from "./native/reader.ts";
export { type CheckpointDescription, iterationName, restoreReplaced } from "./native/writer.ts";
export { claimFolder, isLock, newRunName, ownHolder, WriterClaim, type WriterLock } from "./native/writer-lock.ts";
export { type CheckpointStore, localFolder, openStore } from "./remote/checkpoint-store.ts";
export { withAddresses } from "./remote/copies.ts";
export { placedFolder } from "./remote/folder-copy.ts";
export { isStoreUrl } from "./remote/store-address.ts";
export { mayWriteTo, requireEmpty, requireWritable, writeFolder } from "./remote/stored-folder.ts";
export { openSafetensors, type SafetensorsFile, type TensorEntry, writeSafetensors } from "./safetensors.ts";
export { roomProblem } from "./save-folder.ts";
export {
	ConvertedStore,
	readTensor,
	SelectedStore,
	type Selection,
	selectTensors,
	type TensorStore,
	typeOf,
} from "./store.ts";
export {
	bringChosen,
	failureOfAny,
	openChecked,
	readStoredDataKeys,
	requireOwnSteps,
	type Start,
	storedConfiguration,
} from "./training/choose-checkpoint.ts";
export { commonOf, dataObject, describedModel, readRecord, type TrainingRecord } from "./training/record.ts";
export { canonicalCheckpoint, restoreTensors } from "./training/restore.ts";
export { CheckpointSaver } from "./training/saver.ts";
export { requireTensors, TrainingTensors } from "./training/tensors.ts";
