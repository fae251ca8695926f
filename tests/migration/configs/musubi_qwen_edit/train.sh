accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/qwen_image_train_network.py \
  --model_version edit-2511 --dit /m/edit.safetensors --vae /m/vae.safetensors --text_encoder /m/qwen.safetensors \
  --dataset_config clips.toml --sdpa --mixed_precision bf16 --timestep_sampling shift --weighting_scheme none --discrete_flow_shift 2.2 --network_module networks.lora_qwen_image --network_dim 16 --network_args "exclude_patterns=[r'.*mod.*']" \
  --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing --max_data_loader_n_workers 2 --persistent_data_loader_workers \
  --max_train_epochs 16 --save_every_n_epochs 1 --seed 42 --output_dir /out --output_name mine
