// node transformers_js_pipeline.mjs FOLDER IMAGE LABEL...: what the ready-made pipeline of transformers.js finds, as JSON.
import { createRequire } from 'node:module';
import path from 'node:path';
import { pathToFileURL } from 'node:url';

const installed = createRequire(path.resolve(process.env.NODE_FOLDER, 'package.json'));
const { pipeline, env } = await import(pathToFileURL(installed.resolve('@huggingface/transformers')));
const [folder, image, ...labels] = process.argv.slice(2);
env.allowRemoteModels = false;
env.localModelPath = path.dirname(path.resolve(folder)) + '/';

// Without a dtype: the folder's config.json names the one that it has.
const classify = await pipeline('zero-shot-image-classification', path.basename(folder));
const found = await classify(image, labels, { hypothesis_template: '{}' });
console.log(JSON.stringify({ scores: Object.fromEntries(found.map(({ label, score }) => [label, score])) }));
