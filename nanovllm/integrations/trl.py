from nanovllm.contrib.integrations.trl import rollout_func as rollout_func
