from recipes.amp.ppo.algorithm import main

if __name__ == "__main__":
    main()
