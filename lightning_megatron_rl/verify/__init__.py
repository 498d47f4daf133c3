"""`verify-layout`: one frozen batch through every parallel layout, compared with a single process in fp32."""
