#!/bin/bash
# Latents and text are cached first; nothing of this file is ever run.
MODELS=/workspace/models
OUT="/workspace/out"
python src/musubi_tuner/wan_cache_latents.py --dataset_config clips.toml --vae $MODELS/wan_2.1_vae.safetensors
accelerate launch --num_cpu_threads_per_process 1 --num_processes 2 --mixed_precision fp16 \
  src/musubi_tuner/wan_train_network.py \
  --task t2v-A14B \
  --dit $MODELS/wan2.2_t2v_high_noise_14B_fp16.safetensors \
  --vae $MODELS/wan_2.1_vae.safetensors --t5 $MODELS/umt5-xxl-enc-bf16.pth \
  --dataset_config clips.toml --sdpa --mixed_precision fp16 --fp8_base --fp8_scaled \
  --optimizer_type adamw8bit --optimizer_args weight_decay=0.1 --learning_rate 3e-4 --max_grad_norm 0 \
  --lr_scheduler polynomial --lr_scheduler_power 8 --lr_scheduler_min_lr_ratio 5e-5 \
  --gradient_checkpointing --gradient_accumulation_steps 1 \
  --network_module networks.lora_wan --network_dim 16 --network_alpha 16 \
  --timestep_sampling shift --discrete_flow_shift 3.0 --min_timestep 875 --max_timestep 1000 --preserve_distribution_shape \
  --max_train_epochs 100 --save_every_n_epochs 20 --seed 5 \
  --output_dir "$OUT" --output_name high --metadata_title high --wandb_api_key not-a-real-key \
  --huggingface_token $HF_TOKEN
