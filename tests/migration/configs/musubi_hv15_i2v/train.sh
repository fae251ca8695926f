accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/hv_1_5_train_network.py \
  --task i2v --dit /m/hv.safetensors --vae /m/vae.safetensors --text_encoder /m/q.safetensors --byt5 /m/b.safetensors --image_encoder /m/s.safetensors \
  --dataset_config clips.toml --sdpa --mixed_precision bf16 --timestep_sampling shift --discrete_flow_shift 2.0 --network_module networks.lora_hv_1_5 --network_dim 32 \
  --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing --max_data_loader_n_workers 2 --persistent_data_loader_workers \
  --max_train_epochs 16 --save_every_n_epochs 1 --seed 42 --output_dir /out --output_name mine
