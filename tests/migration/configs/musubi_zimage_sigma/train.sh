accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/zimage_train_network.py \
  --dit /m/z.safetensors --vae /m/ae.safetensors --text_encoder /m/qwen3.safetensors \
  --dataset_config clips.toml --sdpa --mixed_precision bf16 --weighting_scheme logit_normal --logit_mean 0.2 --logit_std 0.8 --discrete_flow_shift 2.0 --lr_warmup_steps 0.05 --lr_scheduler cosine --network_module networks.loha --network_dim 32 --network_alpha 16 \
  --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing --max_data_loader_n_workers 2 --persistent_data_loader_workers \
  --max_train_epochs 16 --save_every_n_epochs 1 --seed 42 --output_dir /out --output_name mine
